"""FREE's adaptive threshold (arXiv 2310.05424): stop where acceptance is unlikely, as a mixture of
two Beta distributions says.

The drafter's probability of its token, and whether the target took it, are gathered over the
rounds. Each of the two groups is a Beta distribution by its mean and variance (the one step of
expectation maximisation that the paper takes from those labels), weighed by its size. th is the
least probability from which on the chance of agreement reaches `goal`, fitted anew every `every`
pairs for the first `most`; then it stays. In FREE the shallow tokens that disagree are kept; here
the target verifies them.
Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, lgamma, log
from statistics import fmean, pvariance

from torch import Tensor

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep, StopRule, tested_rows

GRID = [i / 200 for i in range(1, 200)]


@dataclass(frozen=True, slots=True)
class Beta:
    """A Beta distribution with its weight in a mixture."""

    a: float
    b: float
    weight: float

    @classmethod
    def of(cls, chances: Sequence[float], weight: float) -> Beta:
        """By mean and variance."""
        inside = [min(max(chance, 1e-3), 1 - 1e-3) for chance in chances]
        middle = fmean(inside)
        spread = min(max(pvariance(inside), 1e-4), 0.99 * middle * (1 - middle))
        size = middle * (1 - middle) / spread - 1
        return cls(middle * size, (1 - middle) * size, weight)

    def log_density(self, at: float) -> float:
        """log(weight x density)."""
        norm = lgamma(self.a + self.b) - lgamma(self.a) - lgamma(self.b)
        return log(self.weight) + norm + (self.a - 1) * log(at) + (self.b - 1) * log(1 - at)


def fitted(pairs: Sequence[tuple[float, bool]], goal: float) -> float | None:
    """The threshold for these (probability, agreed) pairs; None where one group is too small."""
    groups = [[chance for chance, agreed in pairs if agreed is wanted] for wanted in (True, False)]
    if min(map(len, groups)) < 4:
        return None
    right, wrong = (Beta.of(group, len(group) / len(pairs)) for group in groups)
    threshold = 1.0
    for at in reversed(GRID):  # down to where agreement is no longer likely enough
        odds = wrong.log_density(at) - right.log_density(at)
        if odds > 50 or 1.0 / (1.0 + exp(odds)) < goal:
            break
        threshold = at
    return threshold


@dataclass(slots=True)
class BetaMixture(StopRule):
    """`threshold` is th until the first fit."""

    threshold: float = 0.4
    goal: float = 0.5
    every: int = 20
    most: int = 300
    pairs: list[tuple[float, bool]] = field(default_factory=list)
    fitted_at: int = 0
    _chances: list[list[float]] = field(default_factory=list, init=False, repr=False)

    def length(self, most: int) -> int:
        self._chances = []
        return most

    def stops(self, step: DraftStep) -> Tensor:
        chance_B = step.chance_B(step.distribution_BK())
        if len(self.pairs) < self.most:
            self._chances.append(chance_B.tolist())
        return chance_B < self.threshold

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        for row in tested_rows(outcome):
            for depth, chances in enumerate(self._chances[: row.num_tested]):
                if row.row < len(chances):
                    self.pairs.append((chances[row.row], depth < row.accepted))
        self._chances = []
        if len(self.pairs) - self.fitted_at >= self.every:
            self.fitted_at = len(self.pairs)
            found = fitted(self.pairs, self.goal)
            self.threshold = self.threshold if found is None else found


STOP = Plugin(
    "beta-mixture",
    "by a threshold fitted to two Betas",
    "https://arxiv.org/abs/2310.05424",
    BetaMixture,
)
