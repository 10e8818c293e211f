"""Auto: the best training-free cascade, and none where none pays.

Rounds are told apart by context, the length of the repeated suffix. For each member and context the
share of drafts that survive each depth is counted from drafts held against the text, played or not,
so E[min(L, k)] of every length k is known without playing it. The arm with the most expected tokens
per second by measured prices is played; if that is plain decoding, nothing is.

Estimates can be wrong, so losses are bounded as well. Each round played is booked at its measured
cost against the tokens it brought; an arm that could bring the account further down than a small
part of the time spent is not played, whatever is expected of it. Looking has an account of its own,
and what drafts have gained. A member that drafts step by step is never looked at: it is expected to
be right until it was played, forgotten in time, and has an account of its own as well.
Prices follow what rounds cost in this run, plain ones included (`runtime/measure/live_costs.py`).

While plain decoding wins, members go on drafting for a while without being verified (which costs
host time only). When nothing came of a whole such window, all of it rests, members that live on the
top-k asleep, for ever longer stretches; a suffix of eight tokens that occurred before ends a rest
at once. So a text that never repeats pays for one look at its newest token per round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.plugins import Plugin
from specctl.runtime.controllers.base import Arm, Controller, Prices, Score
from specctl.runtime.controllers.match import SUFFIXES
from specctl.runtime.measure.live_costs import Account

PRIOR = (0.03, 0.1, 0.25, 0.5, 0.8)  # chance that a first token survives, by context
PRIOR_STEPWISE = 0.6  # of a drafter that is judged by what it plays, in any context
GOING_ON = 0.7  # chance that a further one does
KEPT = 0.98  # per round, of what is known of it: what is not played is tried again one day
TRIALS = 2.0  # plain rounds that such a drafter may lose meanwhile
GLANCE = 4  # rounds of a rest between looks at the newest tokens


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

    def fade(self, share: float) -> None:
        """So much of what was counted is kept."""
        self.tested = [share * count for count in self.tested]
        self.survived = [share * count for count in self.survived]

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
    arm must promise over plain decoding is `margin`. The account may be overdrawn by `allowance`
    plain rounds and an `overdraft` of all rounds so far; it holds at most `most_credit` rounds."""

    window: int = 16
    rest: int = 32
    longest_rest: int = 256
    margin: float = 0.03
    every: int = 8
    overdraft: float = 0.01
    allowance: float = 0.3
    most_credit: float = 8.0
    account: Account = field(init=False)
    accounts: dict[int, Account] = field(default_factory=dict, init=False)  # by member
    looking: Account = field(init=False)  # of drafts that nobody plays
    look_cost: float = field(default=0.0, init=False)
    survival: dict[tuple[int, int], Survival] = field(default_factory=dict, init=False)
    forgets: list[Survival] = field(default_factory=list, init=False)
    round: int = field(default=0, init=False)
    idle: int = field(default=0, init=False)
    resting: int = field(default=0, init=False)
    next_rest: int = field(default=0, init=False)
    rested: int = field(default=0, init=False)
    is_looking: bool = field(default=False, init=False)
    looked: bool = field(default=False, init=False)  # in the newest round

    @property
    def needs_contexts(self) -> bool:  # type: ignore[override]
        """While it rests, now and then: a long match is as long a few tokens later."""
        return self.resting % GLANCE == 0

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.next_rest = self.rest
        members = {arm.member: arm.is_stepwise for arm in arms if arm.member is not None}
        self.account = Account(self.allowance, self.overdraft, self.most_credit)
        self.looking = Account(2.0 * self.allowance, 0.5 * self.overdraft)
        self.accounts = {
            member: Account(TRIALS, self.overdraft, self.most_credit) if alone else self.account
            for member, alone in members.items()
        }
        contexts = range(len(SUFFIXES) + 1)
        self.survival = {
            (member, context): Survival(max(PRIOR[context], PRIOR_STEPWISE * is_stepwise))
            for member, is_stepwise in members.items()
            for context in contexts
        }
        self.forgets = [s for (m, _), s in self.survival.items() if members[m]]

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        self.round += 1
        for survival in self.forgets:
            survival.fade(KEPT)
        for account in (self.account, self.looking, *self.accounts.values()):
            account.rounds = self.round
        if self.resting > 0:
            if not self._wakes(contexts):
                self.resting -= 1
                self.rested += 1
                self.is_looking = False
                return (self.off,)
            self.resting, self.idle = 0, 0
        self.is_listening = True
        playable = self._worth(contexts)
        self._watch(bool(playable))
        if playable and self.prices.ratios.wants_plain(self._account(playable[0]).is_full):
            return (self.off,)
        return [*playable, self.off]

    def _wakes(self, contexts: Sequence[int]) -> bool:
        """A repeated suffix ends a rest if an arm promises something there, a long one always. None
        are known while nobody glances."""
        longest = max(contexts, default=0)
        return longest == len(SUFFIXES) or (longest > 0 and bool(self._worth(contexts)))

    def _worth(self, contexts: Sequence[int]) -> list[int]:
        """Arms that promise more than plain decoding, best first."""
        plain, rates = self.prices.seconds(0), {}
        for i, arm in enumerate(self.arms):
            cost = max((self.prices.of(arm) + self.prices.wake) / plain, 1.0)
            if arm.member is None or not self.accounts[arm.member].affords(cost - 1.0):
                continue
            tokens = 1.0 + self._mean(arm.member, contexts, arm.length)
            rate = tokens / cost
            if rate > 1.0 + self.margin:
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
        if self.idle >= self.window or not self._affords_look():
            self.idle, self.resting = 0, self.next_rest
            self.next_rest = min(2 * self.next_rest, self.longest_rest)
            self.is_listening = False

    def looks(self) -> bool:
        self.looked = self.is_looking and self._affords_look()
        return self.looked

    def _affords_look(self) -> bool:
        """What drafts have gained pays for looking."""
        return self.looking.affords(self.look_cost - max(self.account.balance, 0.0))

    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        if arm != self.off:
            usual = self.prices.of(self.arms[arm])  # one slow moment of the machine is no price
            cost = min(seconds, 3.0 * usual) / self.prices.seconds(0)
            self._account(arm).book(tokens, max(cost, 1.0))

    def _account(self, arm: int) -> Account:
        member = self.arms[arm].member
        return self.account if member is None else self.accounts[member]

    def lost(self, seconds: float) -> None:
        cost = min(seconds / self.prices.seconds(0), 3.0)
        self.looking.book(0.0, cost)
        if self.looked:
            self.look_cost += 0.2 * (cost - self.look_cost)

    def scored(self, score: Score) -> None:
        self.survival[score.member, score.context].add(score.matched, score.known)

    def to_json(self) -> Mapping[str, Any]:
        return {"rounds": self.round, "rested": self.rested}


CONTROLLER = Plugin("auto", "the best training-free cascade, none where none pays", "", Auto)
