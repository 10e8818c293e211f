"""Thompson sampling of the stop decision (EESD, arXiv 2406.03853): acceptance is a coin of unknown
bias. Behind each kept token a bias is drawn from its Beta posterior and drafting goes on with that
probability; accepted and rejected tokens then update the posterior, older ones being forgotten.

With `calibrated` > 0 the drafter's probability of the token counts as that many observations, so
that one token's confidence corrects the common rate (the paper's calibration variant).
Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep, StopRule, tested_rows


@dataclass(slots=True)
class Thompson(StopRule):
    """Beta(`accepted`, `rejected`), faded by `memory` each round. Its own seeded coins decide,
    which no drafted token can influence."""

    memory: float = 0.98
    calibrated: float = 2.0
    accepted: float = 1.0
    rejected: float = 1.0
    seed: int = 0
    coins: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.coins = random.Random(self.seed)

    def stops(self, step: DraftStep) -> Tensor:
        chances = step.chance_B(step.distribution_BK()).tolist()
        return torch.tensor([self._ends(c) for c in chances], device=step.row_B.device)

    def _ends(self, chance: float) -> bool:
        """One row's decision behind a token of that probability."""
        up = self.accepted + self.calibrated * chance
        down = self.rejected + self.calibrated * (1.0 - chance)
        return self.coins.random() > self.coins.betavariate(up, down)

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        rows = list(tested_rows(outcome))
        if not rows:
            return
        self.accepted = 1.0 + self.memory * (self.accepted - 1.0)
        self.rejected = 1.0 + self.memory * (self.rejected - 1.0)
        self.accepted += sum(row.accepted for row in rows)
        self.rejected += sum(row.num_tested - row.accepted for row in rows)


STOP = Plugin("thompson", "by a coin of learned bias", "https://arxiv.org/abs/2406.03853", Thompson)
