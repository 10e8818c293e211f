"""Hedge over configurations with full information (HedgeSpec, arXiv 2510.20064).

After a verification every drafter can be scored on the text, not only the one that played: its own
draft is compared with the tokens that were emitted. A draft that agreed in L tokens would have given
each arm of its member min(L, k) + 1 tokens at that arm's price. Weights grow exponentially with the
gain; plain decoding gains what it costs. Scores of drafts longer than the text known so far arrive
late, and not every round needs one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.runtime.controllers.base import Arm, Controller, Prices, Score


@dataclass
class Hedge(Controller):
    """`rate` is the step of the log-weights, `memory` fades them; members draft to be scored in
    every `every`-th round."""

    rate: float = 0.3
    memory: float = 0.97
    every: int = 2
    gains: list[float] = field(default_factory=list, init=False)
    rounds: int = field(default=0, init=False)

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.gains = [0.0] * len(arms)

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        del contexts
        self.rounds += 1
        ranked = sorted(range(len(self.arms)), key=lambda i: -self.gains[i])
        return ranked[: ranked.index(self.off) + 1]

    def looks(self) -> bool:
        return self.rounds % self.every == 0

    def scored(self, score: Score) -> None:
        plain = 1.0 / self.prices.seconds(0)
        for i, arm in enumerate(self.arms):
            if arm.member != score.member or (not score.is_whole and arm.length > score.known):
                continue
            tokens = 1 + min(score.matched, arm.length)
            speed = tokens / self.prices.of(arm, score.known)
            self.gains[i] = self.memory * self.gains[i] + speed / plain - 1.0

    def weights(self) -> list[float]:
        """Of the arms, summing to one."""
        top = max(self.gains)
        raw = [math.exp(self.rate * (gain - top)) for gain in self.gains]
        return [weight / sum(raw) for weight in raw]

    def to_json(self) -> Mapping[str, Any]:
        return {"weights": [round(weight, 4) for weight in self.weights()]}
