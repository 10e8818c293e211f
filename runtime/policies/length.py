"""How many tokens are worth drafting: what chooses a round's draft length by its costs.

E[tau](alpha, k) / (draft[k] + verify[k]) is maximised over k = 0 (no speculation) up to the
longest measured length, with alpha estimated from recent rounds. Verification costs are a
staircase, so the global argmax is taken, never a local step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from specctl.core.drafter import Outcome, RoundSeconds, RoundView
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.live_costs import FEW_POSITIONS, HORIZON, Account, Ratios
from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.policies.base import RestSpan

RESTED, GLANCE = 4, 64  # after so many rounds without drafts, thinks about every 64th


@dataclass(slots=True)
class LengthChooser:
    """Chooses each round's draft length from a cost table, what rounds cost in this run, and the
    running acceptance.

    One writer: the engine. `memory` rounds are remembered (exponentially). A length must promise
    `margin` over plain decoding, and the account must bear that all of it is rejected; what the
    drafter has `missed`, which it must read first, is part of the cost. While speculation is off, a
    probe of `probe_length` tokens comes after `probe_first` rounds, then after twice as many up to
    `probe_last`, and at once behind a probe that was accepted whole.
    """

    first_is_free: ClassVar[bool] = True  # a text's first token comes with its prompt, undrafted

    costs: CostTable
    alpha: float = 0.6
    memory: float = 32.0
    margin: float = 0.02
    probe_first: int = 16
    probe_last: int = 512
    probe_length: int = 2
    rounds: int = 0
    rounds_off: int = 0
    missed: int = 0  # positions, of the rows of this round
    ratios: Ratios = field(default_factory=lambda: Ratios(first_wait=1))
    account: Account = field(default_factory=Account)
    _read: float = field(default=0.0, init=False)  # seconds of a missed position
    _accepted: float = field(default=0.0, init=False)
    _tested: float = field(default=0.0, init=False)
    _asked: int = field(init=False)
    _since: int = field(init=False)
    _wait: int = field(init=False)
    _table: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._accepted, self._tested, self._wait = 2.0 * self.alpha, 2.0, self.probe_first
        self._asked, self._since, self._read = 0, 0, self.costs.read

    def length(self, batch: int) -> int:
        self.rounds += 1
        self.account.rounds += 1
        best = self._best()
        if best and self.ratios.wants_plain(self.account.is_full):
            best = 0
        elif best == 0:
            self.rounds_off += 1
            best = self._probe()
        else:
            self._since, self._wait = 0, self.probe_first
        self._asked = best
        return best

    def rest(self) -> RestSpan | None:
        """While drafting is off nothing is learned: rounds until it is thought about again, at the
        next probe at the latest, unless that is due and cannot be afforded."""
        if self._asked or self._since < RESTED:
            return None
        until = self._wait - self._since - 1
        rounds = min(GLANCE - 1, until) if until >= 0 else GLANCE - 1
        return RestSpan(rounds) if rounds else None

    def wakes(self, view: RoundView) -> bool:
        return False

    def rested(self, rest: RestSpan) -> None:
        count = len(rest.seconds)
        self.rounds += count
        self.rounds_off += count
        self.account.rounds += count
        self._since += count
        self.ratios.observe(0, rest.usual / self._tabled(0), count)

    def seconds(self, length: int) -> float:
        """Of a round, as rounds go now."""
        return self.ratios.of(length) * self._tabled(length)

    def _tabled(self, length: int) -> float:
        if length not in self._table:
            self._table[length] = self.costs.seconds(length)
        return self._table[length]

    def _best(self) -> int:
        """The length with most expected tokens per second; 0 where speculation loses."""
        plain, alpha = self.seconds(0), self.estimate()
        reading = self.missed * self._read / plain
        best, most = 0, 1.0 + self.margin
        for length in self.costs.verify:
            cost = max(self.seconds(length) / plain, 1.0)  # nothing drafted is cheaper than nothing
            gain = expected_tau(alpha, length) / (cost + reading / HORIZON)
            if length and gain > most and self.account.affords(cost - 1.0 + reading):
                best, most = length, gain
        return best

    def _probe(self) -> int:
        """The length of a round in which nothing is worth drafting."""
        self._since += 1
        if self._since < self._wait:
            return 0
        length = min(self.probe_length, max(self.costs.verify))
        loss = (self.seconds(length) + self.missed * self._read) / self.seconds(0) - 1.0
        if not self.account.affords(loss):
            return 0
        self._since, self._wait = 0, min(2 * self._wait, self.probe_last)
        return length

    def estimate(self) -> float:
        """Running acceptance of tested drafts, kept inside (0, 1)."""
        return min(0.999, max(1e-3, self._accepted / self._tested))

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        depth = outcome.tree.depth
        self._price(outcome, seconds)
        if depth == 0:
            return
        fade = 1.0 - 1.0 / self.memory
        for accepted, finished in zip(outcome.num_accepted, outcome.finished, strict=True):
            if finished is not None:
                continue  # a cut round is no rejection
            self._accepted = fade * self._accepted + accepted
            self._tested = fade * self._tested + min(depth, accepted + 1)
            if accepted >= depth:
                self._wait = min(self._wait, max(1, self._since))

    def _price(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """What the round cost: a lesson about its size, and a debt. A drafter that had nothing to
        say has cost time as well, but is no plain round. Of a slow moment three times what such
        rounds cost is booked."""
        if seconds.is_free:
            return
        asked, depth, spent = self._asked, outcome.tree.depth, seconds.draft + seconds.verify
        if asked and self.missed:
            self._read += 0.5 * (seconds.wake / max(self.missed, FEW_POSITIONS) - self._read)
        if depth > 0 or asked == 0:
            self.ratios.observe(depth, spent / self._tabled(depth))
        if asked == 0:
            return
        plain, usual = self.seconds(0), max(self.seconds(depth), self.seconds(asked))
        tokens = 1.0 + sum(outcome.num_accepted) / max(len(outcome.num_accepted), 1)
        cost = (min(spent, 3.0 * usual) + seconds.wake) / plain
        self.account.book(tokens, max(cost, 1.0))  # a slow plain round makes no gain of nothing


@dataclass(slots=True)
class FixedLength(LengthChooser):
    """The same draft length in every `every`-th round, with the times of these kept, and how long
    it took to read so many positions: the probe that fills a table. Rounds of a drafter that had
    less to say are left out; a tree that branches is whole though its best paths are shorter than
    the length."""

    first_is_free: ClassVar[bool] = False

    fixed: int = 0
    every: int = 1
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    reads: list[tuple[int, float]] = field(default_factory=list)

    def length(self, batch: int) -> int:
        self.rounds += 1
        return 0 if self.rounds % self.every else self.fixed

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        if self.missed and seconds.wake:
            self.reads.append((self.missed, seconds.wake))
        is_full = len(outcome.emitted) == self.costs.batch  # rows may have left already
        tree = outcome.tree
        is_whole = tree.depth == self.fixed or tree.num_nodes > tree.depth > 0  # no draft cut short
        if is_whole and is_full:
            self.draft_seconds.append(seconds.draft)
            self.verify_seconds.append(seconds.verify)
