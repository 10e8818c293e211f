"""A length by batch size: as an operator writes it down, or the measured best at one acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.errors import RecipeError
from specctl.runtime.batching.base import BatchingEntry, RowView
from specctl.runtime.measure.cost_table import BatchCosts

ALPHA = 0.6  # for a table that is made before anything was drafted


@dataclass(frozen=True, slots=True)
class BySize:
    """`table[b]` is the length from b rows on, up to the next size named; below the first: its."""

    table: Mapping[int, int]

    def __post_init__(self) -> None:
        if not self.table or min(self.table) < 1 or min(self.table.values()) < 0:
            raise RecipeError(
                "a table of draft lengths needs batch sizes and lengths",
                where="batching.table",
                found=repr(dict(self.table)),
                expected="sizes of 1 and more, lengths of 0 and more: {1: 6, 8: 3, 32: 0}",
                do="name at least one size",
            )

    @classmethod
    def measured(cls, costs: BatchCosts, alpha: float, longest: int) -> Self:
        """The best length at each measured size if `alpha` of the drafts are accepted."""
        sizes = sorted(costs.tables)
        return cls({size: costs.best_length(size, alpha, longest) for size in sizes})

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        length = self._length(len(rows))
        return tuple(row.at_most(length) for row in rows)

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        return self._length(len(rows)) > 0

    def _length(self, rows: int) -> int:
        sizes = [size for size in self.table if size <= rows]
        return self.table[max(sizes, default=min(self.table))]

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None: ...

    def to_json(self) -> Mapping[str, Any]:
        return {"batching": "table", "table": dict(self.table)}


def _make(depth: int, costs: BatchCosts, table: Mapping[int, int] | None = None) -> BySize:
    if table is None:
        return BySize.measured(costs, ALPHA, depth)
    return BySize({int(size): min(int(k), depth) for size, k in table.items()})


BATCHING = BatchingEntry(
    "table", "a length by batch size", "", _make, setting="table", reads_costs=True
)
