"""Bandits over whole configurations (BanditSpec, arXiv 2505.15141): UCBSpec and EXP3Spec.

The reward of a round is its measured speed in tokens per second, scaled by the fastest arm so far.
UCB plays argmax of mean_i + c sqrt(log t / n_i), with the count of the arm itself under the root
(with the total count the bonus would be the same for all arms and explore nothing). EXP3 keeps
weights, updated by rewards over the probability of having played; it makes no assumption about how
rewards come, so it follows text that drifts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.plugins import Plugin
from specctl.runtime.controllers.base import Arm, Controller, Prices, first


@dataclass(slots=True)
class Speed:
    """Discounted tokens, seconds and plays of one arm: speed is a ratio of sums, because a mean of
    ratios would favour arms with short rounds."""

    tokens: float = 0.0
    seconds: float = 0.0
    plays: float = 0.0

    def fade(self, memory: float) -> None:
        self.tokens, self.seconds = memory * self.tokens, memory * self.seconds
        self.plays *= memory

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds, self.plays = (
            self.tokens + tokens,
            self.seconds + seconds,
            self.plays + 1.0,
        )

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Ucb(Controller):
    """Every arm is played `trials` times, then by the index. `explore` is c; `memory` below 1
    forgets old rounds, for text that changes."""

    explore: float = 0.3
    trials: int = 2
    memory: float = 1.0
    speeds: list[Speed] = field(default_factory=list, init=False)

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.speeds = [Speed() for _ in arms]

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        rare = min(range(len(self.speeds)), key=lambda i: self.speeds[i].plays)
        if self.speeds[rare].plays < min(self.trials, 1.0 / max(1e-9, 1.0 - self.memory)):
            return first(rare, self.off)
        scale = max(speed.rate for speed in self.speeds)
        total = sum(speed.plays for speed in self.speeds)

        def index(i: int) -> float:
            speed = self.speeds[i]
            bonus = self.explore * math.sqrt(math.log(total + 1.0) / max(speed.plays, 1e-9))
            return speed.rate / scale + bonus

        return first(max(range(len(self.speeds)), key=index), self.off)

    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        if self.memory < 1.0:
            for speed in self.speeds:
                speed.fade(self.memory)
        self.speeds[arm].add(tokens, seconds)


@dataclass
class Exp3(Controller):
    """The share of uniform exploration falls with the root of the rounds, down to `least`; `share`
    lets weights drift back (fixed-share), so that no arm is lost for good."""

    least: float = 0.02
    share: float = 1e-4
    slowest: float = 0.03
    seed: int = 0
    weights: list[float] = field(default_factory=list, init=False)
    fastest: float = field(default=0.0, init=False)
    rounds: int = field(default=0, init=False)

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.weights = [1.0] * len(arms)
        self.coins = random.Random(self.seed)

    @property
    def mix(self) -> float:
        """The share of uniform exploration now."""
        count = len(self.weights)
        return max(self.least, min(0.5, math.sqrt(count * math.log(count) / (self.rounds + 1.0))))

    @property
    def step(self) -> float:
        """How far an estimated gain moves a log-weight now."""
        count = len(self.weights)
        return max(self.slowest, math.sqrt(math.log(count) / (count * (self.rounds + 1.0))))

    def chances(self) -> list[float]:
        """The distribution from which arms are drawn."""
        total, count, mix = sum(self.weights), len(self.weights), self.mix
        return [(1 - mix) * w / total + mix / count for w in self.weights]

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        drawn = self.coins.choices(range(len(self.weights)), self.chances())[0]
        return first(drawn, self.off)

    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        speed = tokens / max(seconds, 1e-9)
        self.fastest = max(0.999 * self.fastest, speed)
        gain = speed / self.fastest / self.chances()[arm]
        self.weights[arm] *= math.exp(min(self.step * gain, 1.0))
        self.rounds += 1
        total = sum(self.weights)
        even = self.share * total / len(self.weights)
        self.weights = [((1 - self.share) * w + even) / total for w in self.weights]

    def to_json(self) -> Mapping[str, Any]:
        return {"chances": [round(chance, 4) for chance in self.chances()]}


CONTROLLER = (
    Plugin("ucb", "speed plus a bonus for rare arms", "https://arxiv.org/abs/2505.15141", Ucb),
    Plugin(
        "exp3", "weights by speed, for text that drifts", "https://arxiv.org/abs/2505.15141", Exp3
    ),
)
