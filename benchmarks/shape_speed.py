"""Tokens per second of draft shapes, measured so that differences between them can be told apart.

Prompt by prompt, all shapes in turn; seconds of decoding, without reading the prompt, are medians
over the repeats. Errors come from leaving
out one prompt after the other (jackknife): of a pair of shapes for both at once, because an easy
prompt is easy for both. Letters: P prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import fmean, median

from specctl import Sampling
from specctl.cli.app.progress import duration
from specctl.core.drafter import Drafter
from specctl.runtime.generate import generate
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.prune.shapes import Candidate, DraftShape

ERRORS = 2.0  # standard errors by which two shapes must differ


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens and median seconds of each prompt."""

    tokens_P: tuple[int, ...]
    seconds_P: tuple[float, ...]

    @property
    def rate(self) -> float:
        return sum(self.tokens_P) / sum(self.seconds_P)

    @property
    def rate_without_P(self) -> list[float]:
        """The rate with each prompt left out."""
        tokens, seconds = sum(self.tokens_P), sum(self.seconds_P)
        pairs = zip(self.tokens_P, self.seconds_P, strict=True)
        return [(tokens - t) / (seconds - s) for t, s in pairs]

    @property
    def error(self) -> float:
        return jackknife(self.rate_without_P)


def jackknife(without_P: Sequence[float]) -> float:
    """The standard error of a figure, given its values with each prompt left out."""
    mean, count = fmean(without_P), len(without_P)
    return sqrt((count - 1) / count * sum((x - mean) ** 2 for x in without_P))


def noise(speeds: Mapping[DraftShape, Speed]) -> dict[tuple[DraftShape, DraftShape], float]:
    """By how much two shapes, on the same prompts, must differ to be told apart."""
    return {
        (a, b): ERRORS
        * jackknife(
            [x - y for x, y in zip(speeds[a].rate_without_P, speeds[b].rate_without_P, strict=True)]
        )
        for a, b in combinations(sorted(speeds), 2)
    }


@dataclass(frozen=True, slots=True)
class Effort:
    """Tokens per prompt, passes over all prompts, and minutes behind which no other pass begins."""

    tokens: int
    repeats: int
    minutes: float


def measured(
    served: Target,
    drafts: Mapping[DraftShape, Drafter],
    best: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    effort: Effort,
    reporter: Reporter,
) -> dict[DraftShape, Speed]:
    """Every shape at its predicted best draft length; repeats end early where time is up."""
    setting = Sampling(temperature=0.0, max_new_tokens=effort.tokens, ignore_eos=True)
    policies = {c.shape: make_policy({"policy": "chain", "length": c.length}) for c in best}

    def run(shape: DraftShape, prompt: Sequence[int]) -> tuple[int, float]:
        drafter, policy = drafts[shape], policies[shape]
        stats = generate(served, [prompt], drafter=drafter, policy=policy, sampling=setting).stats
        return stats.tokens, stats.seconds - stats.prefill_seconds

    for shape in policies:
        run(shape, prompts[0])  # warms up
    tokens: dict[tuple[DraftShape, int], int] = {}
    seconds: dict[tuple[DraftShape, int], list[float]] = {}
    total = effort.repeats * len(prompts) * len(policies)
    with reporter.task("measuring", total, "runs") as advance:
        for repeat in within(effort.repeats, 60 * effort.minutes, reporter):
            for index, prompt in enumerate(prompts):
                turn = (index + repeat) % len(best)  # each shape is the first as often as others
                for shape in [c.shape for c in [*best[turn:], *best[:turn]]]:
                    tokens[shape, index], spent = run(shape, prompt)
                    seconds.setdefault((shape, index), []).append(spent)
                    advance(1, shape.name)
    each = range(len(prompts))
    return {
        shape: Speed(
            tuple(tokens[shape, i] for i in each), tuple(median(seconds[shape, i]) for i in each)
        )
        for shape in policies
    }


def within(repeats: int, budget: float, reporter: Reporter) -> Iterator[int]:
    """Repeats, until another one as long as those before would leave the budget; at least one."""
    began = time.perf_counter()
    for repeat in range(repeats):
        spent = time.perf_counter() - began
        if repeat and spent * (repeat + 1) / repeat > budget:
            reporter.say(f"{repeat} of {repeats} repeats fit into {duration(budget)}")
            return
        yield repeat
