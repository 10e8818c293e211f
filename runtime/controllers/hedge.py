"""Hedge over configurations with full information (HedgeSpec, arXiv 2510.20064).

After a verification every drafter can be scored on the text, not only the one that played: its own
draft is compared with the tokens that were emitted. A draft that agreed in L tokens would have
given each arm of its member min(L, k) + 1 tokens at that arm's price. Weights grow exponentially
with the gain; plain decoding gains what it costs. Scores of drafts longer than the text known so
far arrive late, and not every round needs one. A draft that agreed to its end says nothing about
longer ones: for their arms it is continued by the member's rate of agreement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.plugins import Plugin
from specctl.runtime.controllers.base import Arm, Controller, Prices, Score


@dataclass
class Hedge(Controller):
    """`rate` is the step of the log-weights, `memory` fades them; members draft to be scored in
    every `every`-th round."""

    rate: float = 0.3
    memory: float = 0.95
    every: int = 2
    gains: list[float] = field(default_factory=list, init=False)
    agreed: dict[int, list[float]] = field(default_factory=dict, init=False)
    rounds: int = field(default=0, init=False)

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.gains = [0.0] * len(arms)
        self.agreed = {arm.member: [1.0, 2.0] for arm in arms if arm.member is not None}

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        self.rounds += 1
        ranked = sorted(range(len(self.arms)), key=lambda i: -self.gains[i])
        return ranked[: ranked.index(self.off) + 1]

    def looks(self) -> bool:
        return self.rounds % self.every == 0

    def scored(self, score: Score) -> None:
        counts = self.agreed[score.member]
        counts[0] = self.memory * counts[0] + score.matched
        counts[1] = self.memory * counts[1] + score.matched + score.is_whole
        rate, plain = counts[0] / counts[1], 1.0 / self.prices.seconds(0)
        for i, arm in enumerate(self.arms):
            if arm.member != score.member:
                continue
            tokens = 1.0 + min(score.matched, arm.length)
            if not score.is_whole:
                more = arm.length - score.known
                tokens += sum(rate**step for step in range(1, more + 1))
            speed = tokens / self.prices.of(arm, score.depth if score.is_whole else None)
            self.gains[i] = self.memory * self.gains[i] + speed / plain - 1.0

    def weights(self) -> list[float]:
        """Of the arms, summing to one."""
        top = max(self.gains)
        raw = [math.exp(self.rate * (gain - top)) for gain in self.gains]
        return [weight / sum(raw) for weight in raw]

    def to_json(self) -> Mapping[str, Any]:
        return {"weights": [round(weight, 4) for weight in self.weights()]}


CONTROLLER = Plugin(
    "hedge", "weights, every drafter scored", "https://arxiv.org/abs/2510.20064", Hedge
)
