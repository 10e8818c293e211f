"""What rounds cost on a device: seconds by batch and drafted tokens, measured or on a line between.

`CostTable` is what is measured of a pair of models (`runtime.measure.cost`); `BatchCosts` are such
tables by batch size, `TreeCosts` the prices of steps and nodes that follow from one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.runtime.measure.stats import expected_tau


def on_line(known: Mapping[int, float], at: int) -> float:
    """Measured values as they are, straight lines between and beyond them."""
    sizes = sorted(known)
    if at in known or len(sizes) == 1:
        return known.get(at, known[sizes[0]])
    above = next((k for k in sizes[1:] if k >= at), sizes[-1])
    below = sizes[sizes.index(above) - 1]
    slope = (known[above] - known[below]) / (above - below)
    return known[below] + slope * (at - below)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds per round by draft length: `draft[k]`, `verify[k]`; k = 0 is plain decoding. `read`:
    seconds in which the drafter reads one position of what it has missed, a prompt for example."""

    draft: Mapping[int, float]
    verify: Mapping[int, float]
    device: str
    dtype: str
    batch: int
    read: float = 0.0

    def round_seconds(self, length: int) -> float:
        return self.draft[length] + self.verify[length]

    def seconds(self, length: int) -> float:
        """Of a round of any length: measured, or on a line through measured ones."""
        known = {k: self.round_seconds(k) for k in self.verify}
        return on_line(known, length)

    def best_length(self, alpha: float) -> int:
        """The draft length with most expected tokens per second; 0 where speculation loses."""
        return max(self.verify, key=lambda k: expected_tau(alpha, k) / self.round_seconds(k))

    def speedup(self, alpha: float, length: int) -> float:
        """Predicted speed-up over plain decoding."""
        return expected_tau(alpha, length) * self.round_seconds(0) / self.round_seconds(length)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"length": k, "draft_ms": 1e3 * self.draft[k], "verify_ms": 1e3 * self.verify[k]}
            for k in sorted(self.verify)
        ]
        return {"device": self.device, "dtype": self.dtype, "batch": self.batch, "rows": rows}


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


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """Seconds of one draft step, and of a verification by its number of nodes (0: a plain step).
    A round of a tree with n nodes, d levels deep, costs d steps and a verification of n nodes."""

    step: float
    verify: Mapping[int, float]

    @classmethod
    def of(cls, costs: CostTable) -> TreeCosts:
        """From a chain's table: its longest draft gives the price of a step."""
        longest = max(costs.draft)
        spent = costs.draft[longest] - costs.draft.get(0, 0.0)
        return cls(max(spent, 0.0) / max(longest, 1), dict(costs.verify))

    def verify_seconds(self, nodes: int) -> float:
        """Measured sizes as they are, straight lines between and beyond them."""
        return on_line(self.verify, nodes)

    def rate(self, tokens: float, nodes: int, depth: int) -> float:
        """Expected tokens per second of such a round."""
        return tokens / (depth * self.step + self.verify_seconds(nodes))
