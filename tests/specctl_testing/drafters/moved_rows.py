"""How often rows of a cache with a window make room for the next ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specctl.drafters.attention.kept_rows import KeptRows


@contextmanager
def moved_rows() -> Iterator[list[int]]:
    """Meanwhile: how many rows each call of `KeptRows.make_room` dropped."""
    moved, make_room = list[int](), KeptRows.make_room

    def counted(self: KeptRows, kv: Any, slot: int, have: int, last: int) -> None:
        before = self.dropped[slot]
        make_room(self, kv, slot, have, last)
        moved.append(self.dropped[slot] - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptRows, "make_room", counted)
        yield moved
