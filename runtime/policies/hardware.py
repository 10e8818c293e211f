"""What a tree costs on this device: the prices by which policies choose sizes and depths.

A round of a tree with n nodes, d levels deep, costs d draft steps and a verification of n nodes;
both come from the measured cost table of a chain (`runtime/measure/cost.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from specctl.runtime.policies.length import CostTable, on_line


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """Seconds of one draft step, and of a verification by its number of nodes (0: a plain step)."""

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


@runtime_checkable
class Fitting(Protocol):
    """A policy that can be fitted to what the device charges."""

    def fitted(self, costs: TreeCosts) -> Self:
        """The same policy with its sizes, depths or thresholds set by those costs."""
