"""How long a suffix of the text occurred before: what a cascade goes by.

Suffixes of 1, 2, 4 and 8 tokens are looked up among all that ended earlier in the same text. A
context is the number of these that were found, 0 to 4: 0 = the newest token is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SUFFIXES = (1, 2, 4, 8)


@dataclass(slots=True)
class MatchIndex:
    """Suffixes of one text. One writer: the policy `switch`."""

    num_read: int = 0
    seen: set[int] = field(default_factory=set)

    def context(self, tokens: Sequence[int]) -> int:
        """Read what is new, then the context of the newest token."""
        for end in range(self.num_read, len(tokens) - 1):
            self.seen.update(
                hash(tuple(tokens[end + 1 - n : end + 1])) for n in SUFFIXES if n <= end + 1
            )
        size = len(tokens)
        self.num_read = max(self.num_read, size - 1)
        for rank, n in enumerate(SUFFIXES):
            if n > size or hash(tuple(tokens[size - n :])) not in self.seen:
                return rank
        return len(SUFFIXES)


@dataclass(slots=True)
class Matches:
    """One index per live text, found by slot; a slot with another text begins anew."""

    indices: dict[int, tuple[Sequence[int], MatchIndex]] = field(default_factory=dict)

    def contexts(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> list[int]:
        found = []
        for slot, text in zip(slots, texts, strict=True):
            known = self.indices.get(slot)
            if known is None or known[0] is not text:
                known = self.indices[slot] = (text, MatchIndex())
            found.append(known[1].context(text))
        return found
