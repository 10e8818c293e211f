"""Auto: the best training-free cascade, and none where none pays.

Rounds are told apart by context, the length of the repeated suffix. The share of drafts that
survive each depth is counted by context, so E[min(L, k)] of every length k is known without playing
it: for all members together from the text itself (how far it goes on as it did behind the same
suffix), and for each member from its drafts held against the text, played or not. The arm with the
most expected tokens per second by measured prices is played; if that is plain decoding, nothing is.

Estimates can be wrong, so losses are bounded as well. Each round played is booked at its measured
cost against the tokens it brought; an arm that could bring the account below an allowance and a
small part of the time spent is not played, whatever is expected of it. What copying would have won
in the text that was generated adds a little credit. Looking has an account of its own, and what
drafts have gained. A member that drafts step by step is expected to be right until it was played,
forgotten in time, and has an account of its own as well. Prices follow what rounds cost in this
run, plain ones included (`runtime/measure/live_costs.py`).

Members that live on the target's top-k have to listen to every round, and drafts that are not
played take time. Both are done for a window of rounds, then for ever longer stretches not at all,
sooner where drafts have not gained four times what this costs. While nobody is asked the text is
read every few rounds: an arm that is worth its price ends a rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.plugins import Plugin
from specctl.runtime.controllers.base import Arm, Controller, Prices, Score
from specctl.runtime.controllers.match import Repeat
from specctl.runtime.measure.live_costs import HORIZON, Account

PRIOR = (0.03, 0.1, 0.25, 0.5, 0.8)  # chance that a first token survives, by context
PRIOR_STEPWISE = 0.6  # of a drafter that is judged by what it plays, in any context
GOING_ON = 0.7  # chance that a further one does
KEPT = 0.98  # per round, of what is known of it: what is not played is tried again one day
TRIALS = 2.0  # plain rounds that such a drafter may lose meanwhile
GLANCE = 4  # rounds of a rest between looks at the newest tokens,
SELDOM = 4  # as many times more while copying has gained nothing
LONG_REST = 127  # rounds behind which the arms are thought about again
LOOKING = 0.25  # of what drafts have gained, for drafts that are not played
PRICED = 32  # rounds for which it is known what cannot pay
LOOK = 0.5e-3  # seconds that a look takes the host, until one was measured


@dataclass(slots=True)
class Survival:
    """How deep drafts agree with the text in one context: faded counts of tests and survivals per
    depth, with a prior of `weight` tests: `base`, or else `prior` at the first depth."""

    prior: float
    weight: float = 3.0
    memory: float = 0.97
    base: Survival | None = None
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

    def chance(self, depth: int) -> float:
        """That a draft right up to this depth, 0 = the first token, is right there as well."""
        if self.base is not None:
            prior = self.base.chance(depth)
        else:
            prior = self.prior if depth == 0 else GOING_ON
        if depth >= len(self.tested):
            return prior
        return (self.weight * prior + self.survived[depth]) / (self.weight + self.tested[depth])

    def expected_up_to(self, longest: int) -> list[float]:
        """E[min(L, k)] of every length k, 0 and `longest` included, L the tokens that agree."""
        totals, total, alive = [0.0], 0.0, 1.0
        for depth in range(longest):
            if alive >= 1e-3:
                alive *= self.chance(depth)
                total += alive
            totals.append(total)
        return totals


@dataclass
class Auto(Controller):
    """`window` rounds of listening, `rest` to `longest_rest` rounds of none; beside an arm that
    plays, every `every`-th round looks. The gain that an arm must promise over plain decoding is
    `margin`. The account may be overdrawn by `allowance` plain rounds, an `overdraft` of all rounds
    so far, and up to `most_foretold` rounds that copying would have won; it holds at most
    `most_credit` rounds."""

    needs_contexts, is_listening = True, False

    window: int = 16
    rest: int = 32
    longest_rest: int = 256
    margin: float = 0.03
    every: int = 8
    overdraft: float = 0.005
    allowance: float = 1.0
    most_credit: float = 8.0
    most_foretold: float = 3.0
    account: Account = field(init=False)
    accounts: dict[int, Account] = field(default_factory=dict, init=False)  # by member
    looking: Account = field(init=False)  # of drafts that nobody plays
    foretold: Account = field(init=False)  # of drafts that the text itself has judged
    longest: int = field(default=0, init=False)
    copies: list[Arm] = field(default_factory=list, init=False)  # that it judges
    look_cost: float = field(default=0.0, init=False)
    of_text: list[Survival] = field(default_factory=list, init=False)  # by context
    hopeless: dict[int, float] = field(default_factory=dict, init=False)
    hopeful: dict[tuple[int, ...], list[int]] = field(default_factory=dict, init=False)
    worthless: set[tuple[int, ...]] = field(default_factory=set, init=False)  # contexts of a rest
    hopeless_copy: float = field(default=1.0, init=False)  # the lowest of those of `copies`
    costs: list[float] = field(default_factory=list, init=False)  # of `arms`, in plain rounds
    copy_costs: list[float] = field(default_factory=list, init=False)  # of `copies`
    priced_until: int = field(default=0, init=False)
    survival: dict[tuple[int, int], Survival] = field(default_factory=dict, init=False)
    forgets: list[Survival] = field(default_factory=list, init=False)
    round: int = field(default=0, init=False)
    listened: int = field(default=0, init=False)  # rounds of this window
    deaf: int = field(default=0, init=False)  # rounds left without listening
    next_rest: int = field(default=0, init=False)
    num_rested: int = field(default=0, init=False)
    is_looking: bool = field(default=False, init=False)
    looked: bool = field(default=False, init=False)  # in the newest round

    def open(self, arms: Sequence[Arm], prices: Prices) -> None:
        super().open(arms, prices)
        self.next_rest = self.rest
        members = {arm.member: arm.is_stepwise for arm in arms if arm.member is not None}
        plain = prices.seconds(0)
        self.account = Account(self.allowance, self.overdraft, self.most_credit)
        self.foretold = Account(most=self.most_foretold)
        self.longest = max(arm.length for arm in arms)
        self.copies = [arm for arm in arms if arm.is_copy]
        self.looking = Account(0.0, 0.5 * self.overdraft)
        self.look_cost = 0.0 if prices.table is None else LOOK / plain
        self.accounts = {
            member: Account(TRIALS, self.overdraft, self.most_credit) if alone else self.account
            for member, alone in members.items()
        }
        self.of_text = [Survival(prior) for prior in PRIOR]
        self.survival = {
            (member, context): Survival(max(base.prior, PRIOR_STEPWISE))
            if is_stepwise
            else Survival(base.prior, base=base)
            for member, is_stepwise in members.items()
            for context, base in enumerate(self.of_text)
        }
        self.forgets = [s for (m, _), s in self.survival.items() if members[m]]
        self._set_hopeless()

    def order(self, contexts: Sequence[int]) -> Sequence[int]:
        self._pass(1)
        playable = self._worth(contexts)
        self.worthless.clear()
        self._listen([self.arms[i] for i in playable])
        self.is_resting = not (playable or self.is_listening)
        self.off_for = min(LONG_REST, self.deaf) if self.is_resting else 0
        is_promising = max(self.account.balance, self.foretold.balance) > 0.0
        self.glance = GLANCE if is_promising else SELDOM * GLANCE
        if self.is_resting:
            self.num_rested += 1
        elif playable and self.prices.ratios.wants_plain(self._account(playable[0]).is_full):
            return (self.off,)
        return [*playable, self.off]

    def wakes(self, contexts: Sequence[int]) -> bool:
        """Within a rest what was found of a context holds until the text goes on as before."""
        found = tuple(contexts)
        if found in self.worthless:
            return False
        if self._worth(contexts):
            return True
        self.worthless.add(found)
        return False

    def rested(self, rounds: int) -> None:
        self._pass(rounds)
        self.deaf -= rounds
        self.num_rested += rounds

    def _pass(self, rounds: int) -> None:
        self.round += rounds
        for survival in self.forgets:
            survival.fade(KEPT**rounds)

    def _worth(self, contexts: Sequence[int]) -> list[int]:
        """Arms that promise more than plain decoding, best first."""
        self.looking.rounds = self.account.rounds = self.round
        if self.round >= self.priced_until:
            self._set_hopeless()
        hopeful = self._hopeful(tuple(contexts))
        if not hopeful:
            return []
        for member in hopeful:
            self.accounts[member].rounds = self.round
        rates, foretold, reading = {}, max(self.foretold.balance, 0.0), self._reading()
        means: dict[int, list[float]] = {}
        for i, (arm, cost) in enumerate(zip(self.arms, self.costs, strict=True)):
            if arm.member not in hopeful:
                continue
            loss = cost - 1.0 - (foretold if arm.is_copy else 0.0)
            loss += reading / HORIZON if arm.is_stepwise else reading  # a model is tried once
            if self.accounts[arm.member].affords(loss):
                if arm.member not in means:
                    means[arm.member] = self._means(arm.member, contexts)
                rate = (1.0 + means[arm.member][arm.length]) / (cost + reading / HORIZON)
                if rate > 1.0 + self.margin:
                    rates[i] = rate
        return sorted(rates, key=lambda i: -rates[i])

    def _hopeful(self, contexts: tuple[int, ...]) -> list[int]:
        """Members of which a first token may be worth drafting there."""
        if contexts not in self.hopeful:
            self.hopeful[contexts] = [
                m for m, least in self.hopeless.items() if self._first(m, contexts) > least
            ]
        return self.hopeful[contexts]

    def _set_hopeless(self) -> None:
        """What arms cost, for the coming rounds, and so the chances of a first token below which
        no arm of a member can pay, by member: a draft brings at most its length as often as its
        first token. Who is `hopeful` is known by context, until a draft was right there."""
        self.priced_until = self.round + PRICED
        plain = self.prices.seconds(0)
        self.hopeless, self.hopeless_copy = dict.fromkeys(self.accounts, 1.0), 1.0
        self.costs = [max(self.prices.of(arm) / plain, 1.0) for arm in self.arms]
        self.copy_costs = [
            cost for arm, cost in zip(self.arms, self.costs, strict=True) if arm.is_copy
        ]
        self.hopeful.clear()
        for arm, cost in zip(self.arms, self.costs, strict=True):
            if arm.member is not None:
                least = ((1.0 + self.margin) * cost - 1.0) / arm.length
                self.hopeless[arm.member] = min(self.hopeless[arm.member], least)
                if arm.is_copy:
                    self.hopeless_copy = min(self.hopeless_copy, least)

    def _reading(self) -> float:
        """What drafters have to read before the next draft, in plain rounds."""
        return self.prices.wake / self.prices.seconds(0)

    def _first(self, member: int, contexts: Sequence[int]) -> float:
        """The chance that a first drafted token is right; the same as a mean of length 1."""
        total = sum(self.survival[member, context].chance(0) for context in contexts)
        return total / max(len(contexts), 1)

    def _means(self, member: int, contexts: Sequence[int]) -> list[float]:
        """Expected tokens of drafts of every length, over the rows."""
        found = [self.survival[member, each].expected_up_to(self.longest) for each in contexts]
        return [sum(of_rows) / max(len(contexts), 1) for of_rows in zip(*found, strict=True)]

    def _listen(self, playable: Sequence[Arm]) -> None:
        """Listen and look for a window of rounds, now and then beside a player, then do not."""
        if playable and playable[0].is_listener:
            self.deaf, self.listened, self.next_rest = 0, 0, self.rest
        self.is_listening = False
        if self.deaf > 0:
            self.deaf -= 1
        else:
            self.deaf = min(self._until_look(), self.longest_rest)
            self.listened += self.deaf == 0
            if self.listened > self.window:
                self.listened, self.deaf = 0, max(self.deaf, self.next_rest)
                self.next_rest = min(2 * self.next_rest, self.longest_rest)
            self.is_listening = self.deaf == 0
        self.is_looking = self.is_listening and (not playable or self.round % self.every == 0)

    def looks(self) -> bool:
        self.looked = self.is_looking
        return self.looked

    def _until_look(self) -> int:
        """Rounds until a look can be afforded; a part of what drafts have gained pays for it."""
        cost = self.look_cost - LOOKING * max(self.account.balance, 0.0)
        return self.looking.until(cost)

    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        if arm != self.off:
            usual = self.prices.of(self.arms[arm])  # one slow moment of the machine is no price
            cost = min(seconds, 3.0 * usual) / self.prices.seconds(0)
            self._account(arm).book(tokens, max(cost, 1.0))
            self.priced_until = 0

    def _account(self, arm: int) -> Account:
        member = self.arms[arm].member
        return self.account if member is None else self.accounts[member]

    def lost(self, seconds: float) -> None:
        cost = min(seconds / self.prices.seconds(0), 3.0)
        self.looking.book(0.0, cost)
        if self.looked:
            self.look_cost += 0.2 * (cost - self.look_cost)

    def repeated(self, repeat: Repeat) -> None:
        """What copying would have brought in text that was generated is credit to try it."""
        survival = self.of_text[repeat.context]
        if not repeat.is_prompt and survival.chance(0) > self.hopeless_copy:
            means = survival.expected_up_to(self.longest)
            rates = [
                (1.0 + means[arm.length]) / cost
                for arm, cost in zip(self.copies, self.copy_costs, strict=True)
            ]
            best = rates.index(max(rates))
            if rates[best] > 1.0 + self.margin:
                matched = min(repeat.matched, self.copies[best].length)
                self.foretold.book(1.0 + matched, self.copy_costs[best])
        survival.add(repeat.matched, repeat.known)
        if repeat.matched:
            self._forget_hopeful(repeat.context)
            self.worthless.clear()

    def scored(self, score: Score) -> None:
        self.survival[score.member, score.context].add(score.matched, score.known)
        if score.matched:
            self._forget_hopeful(score.context)

    def _forget_hopeful(self, context: int) -> None:
        """Chances have risen in that context."""
        for contexts in [each for each in self.hopeful if context in each]:
            del self.hopeful[contexts]

    def to_json(self) -> Mapping[str, Any]:
        return {"rounds": self.round, "rested": self.num_rested}


CONTROLLER = Plugin("auto", "the best training-free cascade, none where none pays", "", Auto)
