"""Occurrences: where each n-gram of one growing text ended, for drafters that copy from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Occurrences:
    """The first place and the newest ones, at most `most`, where each n-gram of `gram` tokens
    ended. Reading costs only the new tokens. One writer: the DraftState of the row."""

    gram: int
    most: int = 64
    num_read: int = 0
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token: those have a continuation."""
        for end in range(max(self.num_read, self.gram - 1), len(tokens) - 1):
            places = self.ends.setdefault(tuple(tokens[end + 1 - self.gram : end + 1]), [])
            places.append(end)
            if len(places) > self.most:
                del places[1 if self.most > 1 else -1]
        self.num_read = max(self.num_read, len(tokens) - 1)

    def of_suffix(self, tokens: Sequence[int]) -> Sequence[int]:
        """Where the newest n-gram ended before, the first place first."""
        return self.ends.get(tuple(tokens[max(0, len(tokens) - self.gram) :]), ())


def copied(tokens: Sequence[int], end: int, length: int) -> list[int]:
    """The tokens that followed place `end`; a copy that reaches the end of the text goes on copying
    itself."""
    period = len(tokens) - 1 - end
    return [tokens[end + 1 + i % period] for i in range(length)]


def matched(tokens: Sequence[int], end: int, most: int) -> int:
    """How many tokens, at most `most`, the text up to `end` shares with its own end."""
    last = len(tokens) - 1
    length = 0
    while length < min(most, end + 1) and tokens[end - length] == tokens[last - length]:
        length += 1
    return length
