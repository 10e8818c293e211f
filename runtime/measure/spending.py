"""What a budget of turns was, and what it bought (runtime/turns/reward_budget.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass(slots=True)
class Spending:
    """A budget with the costs of a token, all in tokens that the target writes: `small` for one
    that the model beside it writes, `judge` for all readings of one. `share`: of the steps, those
    that the target writes; `again`: the law with which the same texts are written again. The
    thresholds are those that scores were compared with. One writer: the loop."""

    budget: float
    small: float
    judge: float
    share: float
    again: str
    thresholds: list[float] = field(default_factory=list)

    def spent(self, tokens: int, by_target: int, drafted: int) -> float:
        """By these costs, of what the target alone would need for as many tokens."""
        costs = drafted * (self.small + self.judge) + by_target
        return costs / tokens if tokens else 0.0

    @property
    def said_again(self) -> str:
        """How a user has the same text again."""
        return f"the same text again: --mix {self.again}=..."

    def __str__(self) -> str:
        deltas = self.thresholds or [0.0]
        return (
            f"a budget of {self.budget:g} | a token costs {self.small:g} written by the other "
            f"model, {self.judge:g} read | {self.share:.0%} of the steps for the target | delta "
            f"{min(deltas):.3f} to {max(deltas):.3f}, {fmean(deltas):.3f} on average"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "small": self.small,
            "judge": self.judge,
            "share": round(self.share, 6),
            "again": self.again,
            "thresholds": [round(one, 6) for one in self.thresholds],
        }
