"""Reward-guided decoding within a budget: the threshold of a step's score follows from the cost.

The user says what a text may cost, as a share of what the target alone would need. With the costs
of a token in tokens of the target, `small` for the small model's writing and `judge` for all that a
judged step makes others read, the steps of the small model of which the share q is written again
by the target cost, per token,

    small + judge + q        hence        q = budget - small - judge

Within a budget the best weight of the small model's steps is a step function of their score (arXiv
2501.19324): the worst of them, of share q, are the target's. Which scores are the worst is seen as
the text goes on. With the i - 1 scores so far in order, 0 in front and 1 behind
them, delta is the point at level_i of the way through the i gaps, and

    level_i = q + GAIN (q (i - 1) - steps of the target so far)

makes up for steps too many or too few (adaptive conformal inference, arXiv 2106.00002), so that
whatever the scores are, of i steps q i are the target's, but for 1 + 1 / GAIN. Every text begins
anew, so it depends on no other.

The costs are given, or measured before the first text, rounded and said in the result, with the
words that repeat it. `judge` is the judge's reading and the target's, which goes on behind kept
steps. What it leaves out is that the small model reads the target's steps, and whatever drafts for
the target. A budget below small + judge is refused; there q is 0 and the text the small model's.
With the whole budget, 1, the target writes alone, and nothing is judged.
Letters: as in reward.py.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

from specctl.core.errors import RecipeError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.measure.spending import Spending
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixture import Mixture
from specctl.runtime.turns.reward import Judge, RewardTurns, Threshold

GAIN = 0.5
EVERY = 2.0  # a threshold that no score reaches
DIGITS = 3  # of a measured cost
WRITTEN, TIMES = 8, 3  # tokens that are written when costs are measured, and how often
LONGEST = 32  # tokens of a measured step
WITHIN = 1e-9  # a budget that differs less from its costs is at its end


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a token in tokens that the target writes; 0 for those still to be measured."""

    small: float
    judge: float

    @property
    def least(self) -> float:
        """Of a text of which the target writes nothing."""
        return self.small + self.judge


class ShareThreshold(Threshold):
    """The threshold of one text, below which the share q of its scores lies; `used` is extended by
    what each score was compared with."""

    def __init__(self, share: float, used: list[float]) -> None:
        self.share, self.level, self.used = share, share, used
        self._scores: list[float] = []
        super().__init__(self._quantile())

    def drops(self, score: float) -> bool:
        self.used.append(self.delta)
        is_dropped = super().drops(score)
        insort(self._scores, score)
        self.level += GAIN * (self.share - is_dropped)
        self.delta = self._quantile()
        return is_dropped

    def _quantile(self) -> float:
        if self.level <= 0:
            return 0.0
        if self.level >= 1:
            return EVERY
        ends = [0.0, *self._scores, 1.0]
        gap, within = divmod(self.level * (len(ends) - 1), 1)
        low, high = ends[int(gap)], ends[int(gap) + 1]
        return low + within * (high - low)


class BudgetTurns(RewardTurns):
    """Turns by the score of a step, as many of the target's as the budget has room for."""

    def __init__(self, large: Engine, others: Sequence[Target], mixture: Mixture) -> None:
        super().__init__(large, others, mixture)
        self.budget, _, *costs = mixture.numbers
        self.costs = StepCosts(*costs)
        self.is_whole = self.budget >= 1
        if not self.is_whole:
            check_budget(self.budget, self.costs, mixture)

    def open(self, longest: int) -> None:
        """Also measures the costs that are not given. RecipeError where the budget is below."""
        super().open(longest)
        if not (self.is_whole or (self.costs.small and self.costs.judge)):
            found = measured_costs(self, min(self.longest, LONGEST))
            self.costs = StepCosts(self.costs.small or found.small, self.costs.judge or found.judge)
            check_budget(self.budget, self.costs, self.mixture)
        if not self.is_whole:
            self.counts.spending = spending_of(self.budget, self.longest, self.costs)

    def threshold(self) -> Threshold:
        assert self.counts.spending is not None, "open() knows the costs"
        return ShareThreshold(self.counts.spending.share, self.counts.spending.thresholds)

    def rounds(self, row: Row) -> Iterator[tuple[int, ...]]:
        if not self.is_whole:
            yield from super().rounds(row)
            return
        began = row.num_new
        with closing(self.write(self.large, row)) as turn:
            for emission in turn:
                yield self.extend(row, emission, len(emission.tokens))
                if row.finished is not None:
                    break
        self.counts.count(row.num_new - began, is_target=True)


def spending_of(budget: float, longest: int, costs: StepCosts) -> Spending:
    """What these costs leave to the target."""
    share = budget - costs.least
    share = 0.0 if share < WITHIN else share
    said = again(budget, longest, costs)
    return Spending(budget, costs.small, costs.judge, share, said)


def again(budget: float, longest: float, costs: StepCosts) -> str:
    """The law with all its numbers."""
    numbers = (budget, longest, costs.small, costs.judge)
    return ":".join(["reward-budget", *(f"{number:.12g}" for number in numbers)])


def check_budget(budget: float, costs: StepCosts, mixture: Mixture) -> None:
    """Refuse a budget in which the small model's steps cannot even be judged."""
    if budget >= costs.least - WITHIN:
        return
    reachable = costs.least < 1
    raise RecipeError(
        "this budget is below what writing and judging every step costs",
        where="--mix",
        found=f"{budget:g} of the target's cost, of which a token written by {mixture.models[0]} "
        f"takes {costs.small:g} and one that is judged {costs.judge:g}",
        expected=f"{costs.least:g} to 1" if reachable else "1, as the target alone is cheaper",
        do=(
            f"write --mix {again(_above(costs.least), mixture.numbers[1], costs)}={mixture.model}"
            if reachable
            else "leave out --mix, or name smaller models beside the target"
        ),
    )


def _above(number: float) -> float:
    """Rounded up to hundredths."""
    return math.ceil(number * 100 - WITHIN) / 100


def measured_costs(turns: RewardTurns, step: int) -> StepCosts:
    """The least seconds of a token, written and read behind a text of few tokens, which other work
    on the machine disturbs least. `step`: tokens that are read at once."""
    target, small = turns.large.target, turns.small.target
    room = min(turns.context - 1, step + WRITTEN)
    step = max(1, min(step, room - 1))
    judge = turns.judge.target
    timed: list[tuple[float, ...]] = []
    for _ in range(TIMES):  # all of them in turn, so that what slows the machine slows each
        reading = read(judge, step)
        behind = reading if judge is target else read(target, step)
        timed.append((written(target, room), written(small, room), reading, behind))
    own, other, reading, behind = map(min, zip(*timed, strict=True))
    return StepCosts(_rounded(other / own), _rounded((reading + behind) / own))


def _rounded(cost: float) -> float:
    return float(f"{cost:.{DIGITS}g}")


def written(target: Target, room: int) -> float:
    """Seconds of a token that the model writes alone; what it writes, and its ends, say nothing."""
    engine = Engine(target)
    engine.open(room)
    text = (0,) * max(1, room - WRITTEN)
    sampling = Sampling(max_new_tokens=max(2, room - len(text)), ignore_eos=True)
    engine.submit(0, Request(text, sampling, logprobs=0))
    seconds = []
    while engine.is_busy:
        began = perf_counter()
        engine.step()
        seconds.append(perf_counter() - began)
    return min(seconds[1:] or seconds)


def read(target: Target, step: int) -> float:
    """Seconds of a token that the model reads and scores, a step at once."""
    judge = Judge(target)
    judge.open(step + 1)
    judge.score([0], [0] * step)
    return judge.seconds / step
