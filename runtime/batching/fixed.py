"""Lengths that all rows share: one that never changes, and BASS's, which follows the batch.

BASS: batched attention-optimized speculative sampling (Qian et al., arXiv 2404.15778), Algorithm 1:
begin at 7; if a row accepted its whole draft, l := min(l + 2, 32); otherwise
l := max(1, accepted of the best row, l - ceil(l / 10) - s), where s = 1 after a decrease, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.runtime.batching.base import BatchingEntry, RowView

FIRST, STEP, MOST = 7, 2, 32  # of BASS


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `length`."""

    length: int = 4

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        return tuple(row.at_most(self.length) for row in rows)

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        return self.length > 0

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None: ...

    def to_json(self) -> Mapping[str, Any]:
        return {"batching": "fixed", "length": self.length}


@dataclass(slots=True)
class Bass:
    """One length for all, from what the best row accepted."""

    most: int = MOST
    length: int = FIRST
    fell: bool = False
    _asked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.length = min(self.length, self.most)

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        self._asked = tuple(row.at_most(self.length) for row in rows)
        return self._asked

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        return True

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        whole = [n for n, k in zip(outcome.num_accepted, self._asked, strict=True) if k]
        if not whole:
            return
        best = max(whole)
        if best >= max(self._asked):
            self.length, self.fell = min(self.length + STEP, self.most), False
            return
        shorter = self.length - -(-self.length // 10) - self.fell
        self.length, self.fell = max(1, best, shorter), True

    def to_json(self) -> Mapping[str, Any]:
        return {"batching": "bass", "length": self.length}


BATCHING = (
    BatchingEntry(
        "fixed",
        "one length for all, always",
        "",
        lambda depth, costs, length=None: Fixed(depth if length is None else min(length, depth)),
        setting="length",
    ),
    BatchingEntry(
        "bass",
        "one length for all, from what the best row accepted",
        "https://arxiv.org/abs/2404.15778",
        lambda depth, costs: Bass(most=depth),
    ),
)
