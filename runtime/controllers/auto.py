"""Auto: the best training-free cascade, and none where none pays.

Rounds are told apart by context, the length of the repeated suffix. For each member and context the
share of drafts that survive each depth is counted from drafts held against the text, played or not,
so E[min(L, k)] of every length k is known without playing it. The arm with the most expected tokens
per second by measured prices is played; if that is plain decoding, nothing is.

While plain decoding wins, members go on drafting for a while without being verified (which costs
host time only). When nothing came of a whole such window, all of it rests, members that live on the
top-k asleep, for ever longer stretches; a suffix of eight tokens that occurred before ends a rest
at once. So a text that never repeats pays for one look at its newest token per round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.runtime.controllers.base import Arm, Controller, Prices, Score
from specctl.runtime.controllers.match import SUFFIXES

PRIOR = (0.03, 0.1, 0.35, 0.6, 0.85)  # chance that a first token survives, by context
GOING_ON = 0.75  # chance that a further one does


@dataclass(slots=True)
class Survival:
    """How deep the drafts of one member agree in one context: faded counts of tests and survivals
    per depth, with a prior of `weight` tests."""

    prior: float
    weight: float = 3.0
    memory: float = 0.97
    tested: list[float] = field(default_factory=list)
    survived: list[float] = field(default_factory=list)

    def add(self, matched: int, known: int) -> None:
        num_tested = min(known, matched + 1)
        while len(self.tested) < num_tested:
            self.tested.append(0.0)
            self.survived.append(0.0)
        for depth in range(num_tested):
            self.tested[depth] = self.memory * self.tested[depth] + 1.0
            self.survived[depth] = self.memory * self.survived[depth] + (depth < matched)

    def expected(self, length: int) -> float:
        """E[min(L, length)], L the number of tokens that agree."""
        total, alive = 0.0, 1.0
        for depth in range(length):
            tested, survived = 0.0, 0.0
            if depth < len(self.tested):
                tested, survived = self.tested[depth], self.survived[depth]
            prior = self.prior if depth == 0 else GOING_ON
            alive *= (self.weight * prior + survived) / (self.weight + tested)
            total += alive
            if alive < 1e-3:
                break
        return total


@dataclass
class Auto(Controller):
    """`window` rounds of looking, `rest` to `longest_rest` rounds of not looking; the gain that an
    arm must promise over plain decoding is `margin`."""

    window: int = 16
    rest: int = 32
    longest_rest: int = 256
    margin: float = 0.03
    every: int = 8
    survival: dict[tuple[int, int], Survival] = field(default_factory=dict, init=False)
    round: int = field(default=0, init=False)
    idle: int = field(default=0, init=False)
    resting: int = field(default=0, init=False)
    next_rest: int = field(default=0, init=False)
    rested: int = field(default=0, init=False)
    is_looking: bool = field(default=False, init=False)

    needs_contexts = True

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.next_rest = self.rest
        members = {arm.member for arm in arms if arm.member is not None}
        contexts = range(len(SUFFIXES) + 1)
        self.survival = {(m, c): Survival(PRIOR[c]) for m in members for c in contexts}

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        self.round += 1
        if self.resting > 0:
            if max(contexts, default=0) < len(SUFFIXES):
                self.resting -= 1
                self.rested += 1
                self.is_looking = False
                return (self.off,)
            self.resting, self.idle = 0, 0
        self.is_listening = True
        playable = self._worth(contexts)
        self._watch(bool(playable))
        return [*playable, self.off]

    def _worth(self, contexts: Sequence[int]) -> list[int]:
        """Arms that promise more than plain decoding, best first."""
        bound = (1.0 + self.margin) / self.prices.seconds(0)
        rates = {}
        for i, arm in enumerate(self.arms):
            if arm.member is None:
                continue
            tokens = 1.0 + self._mean(arm.member, contexts, arm.length)
            rate = tokens / self.prices.of(arm)
            if rate > bound:
                rates[i] = rate
        return sorted(rates, key=lambda i: -rates[i])

    def _mean(self, member: int, contexts: Sequence[int], length: int) -> float:
        total = sum(self.survival[member, context].expected(length) for context in contexts)
        return total / max(len(contexts), 1)

    def _watch(self, pays: bool) -> None:
        """Look in idle rounds, and now and then beside a player; rest after a barren window."""
        if pays:
            self.idle, self.next_rest = 0, self.rest
            self.is_looking = self.round % self.every == 0
            return
        self.idle += 1
        self.is_looking = True
        if self.idle >= self.window:
            self.idle, self.resting = 0, self.next_rest
            self.next_rest = min(2 * self.next_rest, self.longest_rest)
            self.is_listening = False

    def looks(self) -> bool:
        return self.is_looking

    def scored(self, score: Score) -> None:
        self.survival[score.member, score.context].add(score.matched, score.known)

    def to_json(self) -> Mapping[str, Any]:
        return {"rounds": self.round, "rested": self.rested}
