"""How often drafts have been accepted lately, by row and over the batch.

A row that has drafted little is believed to be like the others. What was asked for and not drafted
counts as not accepted: a drafter that is silent half of the time is worth half as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl.core.drafter import Outcome
from specctl.runtime.batching.base import RowView

SURE = 0.999  # no estimate is certain
NEVER = 1e-3


@dataclass(slots=True)
class Count:
    """Levels accepted of levels tested, fading by rounds."""

    accepted: float = 0.0
    tested: float = 0.0

    def add(self, accepted: int, tested: int, memory: float) -> None:
        fade = 1.0 - 1.0 / memory
        self.accepted = fade * self.accepted + accepted
        self.tested = fade * self.tested + tested


@dataclass(slots=True)
class History:
    """`first` is believed before anything is known. `memory`: rounds remembered of a row.
    `doubt`: how many tests the batch's average weighs against a row's own. One writer: the policy
    that owns it."""

    first: float = 0.6
    memory: float = 64.0
    doubt: float = 4.0
    _rows: dict[int, Count] = field(default_factory=dict)
    _all: Count = field(default_factory=Count)
    _asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Acceptance over the rows that have drafted lately."""
        known = self._all
        return (known.accepted + self.doubt * self.first) / (known.tested + self.doubt)

    def alpha(self, index: int) -> float:
        """The chance that a level of that row's draft is accepted, once the one above it is."""
        own = self._rows.get(index, Count())
        found = (own.accepted + self.doubt * self.mean) / (own.tested + self.doubt)
        return min(SURE, max(NEVER, found))

    def ask(self, rows: Sequence[RowView], lengths: Sequence[int]) -> tuple[int, ...]:
        """Remember what this round asks of whom; rows that have left are forgotten."""
        self._rows = {row.index: self._rows.get(row.index, Count()) for row in rows}
        self._asked = [(row.index, length) for row, length in zip(rows, lengths, strict=True)]
        return tuple(lengths)

    def narrow(self, lengths: Sequence[int]) -> None:
        """Of what the round was asked, this much is verified."""
        self._asked = [(index, n) for (index, _), n in zip(self._asked, lengths, strict=True)]

    def observe(self, outcome: Outcome) -> None:
        """A round that was cut says nothing: its last drafts may have been right."""
        ended = zip(self._asked, outcome.num_accepted, outcome.finished, strict=True)
        for (index, asked), accepted, finished in ended:
            if asked and finished is None:
                tested = min(asked, accepted + 1)
                self._rows[index].add(accepted, tested, self.memory)
                self._all.add(accepted, tested, self.memory * max(1, len(self._asked)))
