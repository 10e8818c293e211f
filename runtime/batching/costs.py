"""What a round of a whole batch costs: the measured table by batch size and draft length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.policies.length import CostTable, on_line


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """A cost table for each of some batch sizes, all of the same lengths (`measure_batch_costs`).
    What was not measured lies on straight lines between and beyond (T = a batch + c in pieces)."""

    tables: Mapping[int, CostTable]

    def __post_init__(self) -> None:
        assert self.tables, "no batch size was measured"

    def seconds(self, rows: int, length: int) -> float:
        """Of a round of so many rows whose deepest drafts `length` tokens."""
        found = {batch: table.seconds(length) for batch, table in self.tables.items()}
        return max(on_line(found, rows), min(found.values()) * 1e-3)

    def best_length(self, rows: int, alpha: float, longest: int) -> int:
        """The common length with most expected tokens per second."""
        every = range(longest + 1)
        return max(every, key=lambda k: expected_tau(alpha, k) / self.seconds(rows, k))

    def to_json(self) -> list[dict[str, Any]]:
        return [self.tables[batch].to_json() for batch in sorted(self.tables)]
