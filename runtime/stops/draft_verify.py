"""Draft & Verify's threshold controller (arXiv 2309.08168): a confidence stop that tunes itself.

Stop behind a token whose own probability is below th. After each round the share of accepted tokens
enters a moving average m; th moves a small step up where m is below the wanted share, else down,
and is smoothed. A round that drafted to its ceiling says nothing about th, which then stays.
Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep, StopRule, tested_rows


@dataclass(slots=True)
class DraftVerify(StopRule):
    """`threshold` is where th starts; `wanted`, `step`, `match_memory` and `memory` are the
    published constants."""

    threshold: float = 0.8
    wanted: float = 0.9
    step: float = 0.01
    match_memory: float = 0.5
    memory: float = 0.9
    matched: float = 1.0
    ceiling: int = 0

    def length(self, most: int) -> int:
        self.ceiling = most
        return most

    def stops(self, step: DraftStep) -> Tensor:
        return step.chance_B(step.distribution_BK()) < self.threshold

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        rows = list(tested_rows(outcome))
        if not rows:
            return
        share = sum(row.accepted for row in rows) / sum(row.drafted for row in rows)
        self.matched = self.match_memory * self.matched + (1 - self.match_memory) * share
        if all(row.drafted == self.ceiling for row in rows):
            return
        aim = self.threshold + (self.step if self.matched < self.wanted else -self.step)
        aim = self.memory * self.threshold + (1 - self.memory) * aim
        self.threshold = min(1.0, max(0.0, aim))


STOP = Plugin(
    "draft-verify", "by a self-tuned threshold", "https://arxiv.org/abs/2309.08168", DraftVerify
)
