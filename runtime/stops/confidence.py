"""Confidence: stop behind a token to which the drafter gave little probability.

`Confidence` looks at the drafter's largest probability (Kangaroo's second exit, arXiv 2404.18911)
or at that of the kept token (the constant schedule of transformers). `RocThreshold` learns the
threshold from past rounds as transformers' dynamic speculation does: of all thresholds it takes the
one with the least (false positives) + 3 (false negatives), both as rates.
Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep, StopRule, tested_rows


@dataclass(slots=True)
class Confidence(StopRule):
    """Stop where the largest probability is below `threshold`."""

    threshold: float = 0.4

    def stops(self, step: DraftStep) -> Tensor:
        return step.distribution_BK().amax(-1) < self.threshold


@dataclass(slots=True)
class RocThreshold(StopRule):
    """Stop where the kept token's own probability is below a learned threshold."""

    threshold: float = 0.4
    memory: int = 512
    least: int = 6
    miss_cost: float = 3.0
    pairs: deque[tuple[float, bool]] = field(init=False)
    chances: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.pairs = deque(maxlen=self.memory)

    def stops(self, step: DraftStep) -> Tensor:
        if step.index == 0:
            self.chances = []
        chance_B = step.chance_B(step.distribution_BK())
        self.chances.append(chance_B)
        return chance_B < self.threshold

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        seen = [chance_B.tolist() for chance_B in self.chances]
        self.chances = []
        for tested in tested_rows(outcome):
            for i in range(min(tested.num_tested, len(seen))):
                self.pairs.append((seen[i][tested.row], i < tested.accepted))
        matched = sum(is_match for _, is_match in self.pairs)
        if len(self.pairs) >= self.least and 0 < matched < len(self.pairs):
            self.threshold = best_threshold(list(self.pairs), self.miss_cost)


def best_threshold(pairs: list[tuple[float, bool]], miss_cost: float) -> float:
    """The score at which "score >= threshold means accepted" costs least, counting the rate of
    wrongly continued plus `miss_cost` times the rate of wrongly stopped."""
    score, matched = (np.array(column) for column in zip(*pairs, strict=True))
    order = np.argsort(-score, kind="stable")
    score, matched = score[order], matched[order].astype(float)
    hit = np.cumsum(matched) / matched.sum()
    wrong = np.cumsum(1.0 - matched) / (1.0 - matched).sum()
    last = np.append(score[1:] != score[:-1], True)  # equal scores fall on one side together
    cost = np.where(last, wrong + miss_cost * (1.0 - hit), np.inf)
    return float(score[int(cost.argmin())])


STOP = (
    Plugin(
        "confidence",
        "where the best token is unlikely",
        "https://arxiv.org/abs/2404.18911",
        Confidence,
    ),
    Plugin("roc", "where the token's probability is below a learned threshold", "", RocThreshold),
)
