"""Thompson sampling over configurations: acceptance is unknown, prices are measured.

Each member's acceptance is a coin with a Beta posterior, counted over tested tokens and faded. Per
round one bias is drawn for each member and the arm with the most expected tokens per second is
played, (1 - a^(k+1)) / (1 - a) tokens over the price of k nodes; a member's lengths share what it
has learned. (The control of EESD, arXiv 2406.03853, at the level of rounds.)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.plugins import Plugin
from specctl.runtime.controllers.base import Arm, Controller, Prices, Score, first
from specctl.runtime.measure.stats import expected_tau


@dataclass
class Posterior(Controller):
    """Beta(1, 1) priors; `memory` fades what was counted at each score of that member."""

    memory: float = 0.99
    seed: int = 0
    beta: dict[int, list[float]] = field(default_factory=dict, init=False)

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.coins = random.Random(self.seed)
        self.beta = {arm.member: [1.0, 1.0] for arm in arms if arm.member is not None}

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        drawn = {m: self.coins.betavariate(*counts) for m, counts in self.beta.items()}

        def rate(i: int) -> float:
            arm = self.arms[i]
            tokens = 1.0 if arm.member is None else expected_tau(drawn[arm.member], arm.length)
            return tokens / self.prices.of(arm)

        return first(max(range(len(self.arms)), key=rate), self.off)

    def scored(self, score: Score) -> None:
        counts = self.beta[score.member]
        counts[:] = [1.0 + self.memory * (count - 1.0) for count in counts]
        counts[0] += score.matched
        counts[1] += score.is_whole

    def to_json(self) -> Mapping[str, Any]:
        return {"acceptance": {m: round(a / (a + b), 3) for m, (a, b) in self.beta.items()}}


CONTROLLER = Plugin(
    "thompson", "acceptance drawn from its posterior", "https://arxiv.org/abs/2406.03853", Posterior
)
