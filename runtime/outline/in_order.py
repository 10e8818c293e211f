"""What several rows write at once, in the order of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """Items of several parts, one part behind the other. `heads`: what stands in front of each
    part. What comes of a part is held back until all parts in front of it have ended. One writer:
    whoever reads the rows."""

    def __init__(self, heads: Sequence[Sequence[T]]) -> None:
        self._held: list[list[T]] = [list(head) for head in heads]
        self._ended = [False] * len(heads)
        self._at = 0  # the part that is being given out

    @property
    def current(self) -> int:
        """The part that is being given out; the number of parts behind the last."""
        return self._at

    def add(self, part: int, items: Sequence[T]) -> list[T]:
        """What may be given out now that a part has these items, too."""
        self._held[part].extend(items)
        return self._free()

    def end(self, part: int) -> list[T]:
        """What may be given out now that nothing more comes of a part."""
        self._ended[part] = True
        return self._free()

    def _free(self) -> list[T]:
        out = list[T]()
        while self._at < len(self._held):
            out += self._held[self._at]
            self._held[self._at] = []
            if not self._ended[self._at]:
                break
            self._at += 1
        return out
