"""What rounds cost while they run, and what drafting may lose.

A cost table is measured once, and a machine has other work as well: the drafter, wide forwards or
everything may take longer than the table says, each by a factor of its own, and no longer a minute
later. So those who choose by a table correct it by every round they see (`Ratios`), play a plain
round now and then while they draft, since what drafting is worth is a ratio of both, and keep an
account of what drafting has won and lost by measured time (`Account`): whatever the estimates say,
what it may lose is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from statistics import median_low

HORIZON = 64  # rounds in which the reading of what was missed must pay
FEW_POSITIONS = 32  # reading fewer takes what reading so many does
NUM_RECENT = 9  # rounds of one size whose median counts: one slow moment is no price
OWN_ROUNDS = 128  # rounds after which the price of a size is taken from other sizes again
FIRST_WAIT, LAST_WAIT = 4, 128  # rounds that draft between plain ones
NARROW_WAIT = 32  # the same while the account is not full
SHIFT = 1.3  # a change of what drafting rounds cost that says the same of plain ones
NUM_SHIFTED = 5  # rounds that must have changed
BURST = 2  # plain rounds that are measured together
NUM_FEW = 3  # rounds before which what they cost may be chance
OF_FEW = 1.5  # most that these may make drafts dearer, beside plain rounds


@dataclass(slots=True)
class Recent:
    """Newest ratios of one size; `at`: the round of the last."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    at: int = 0
    _middle: float | None = 1.0  # None: to be found

    def add(self, ratio: float, at: int) -> None:
        self.ratios.append(ratio)
        self.at, self._middle = at, None

    @property
    def middle(self) -> float:
        """Of several the median, of two the lower one: luck makes nothing dear."""
        if self._middle is None:
            self._middle = median_low(self.ratios)
        return self._middle


@dataclass(slots=True)
class Ratios:
    """Measured over tabled seconds by the size of a round's draft, 0 = plain. One writer: who
    chooses by the table."""

    first_wait: int = FIRST_WAIT
    round: int = 0
    seen: dict[int, Recent] = field(default_factory=dict)
    drafted: Recent = field(default_factory=Recent)  # of any size but 0
    since: int = 0  # rounds that drafted since a plain one
    wait: int = FIRST_WAIT
    burst: int = 0  # plain rounds still to be measured
    before: float | None = None  # what drafting rounds cost when a plain one was measured

    def observe(self, size: int, ratio: float, rounds: int = 1) -> None:
        """A round with a draft of that size is over, or as many; `ratio` is usual among them."""
        self.round += rounds
        if size not in self.seen:
            self.seen[size] = Recent()
        self.seen[size].add(ratio, self.round)
        if size == 0:
            self._measured_plain()
            return
        self.since += 1
        self.drafted.add(ratio, self.round)
        if self.before is not None and self._has_shifted(self.before):
            self.seen.pop(0, None)
            self.before, self.wait, self.burst = None, FIRST_WAIT, BURST

    def _measured_plain(self) -> None:
        self.burst = max(0, self.burst - 1)
        if self.burst == 0:
            self.since, self.wait = 0, min(2 * self.wait, LAST_WAIT)
            self.before = self.drafted.middle if self.drafted.ratios else None

    def _has_shifted(self, before: float) -> bool:
        if self.since < NUM_SHIFTED:
            return False
        newest = list(self.drafted.ratios)[-NUM_SHIFTED:]
        return not before / SHIFT < median_low(newest) < before * SHIFT

    def wants_plain(self, is_safe: bool) -> bool:
        """Whether a plain round should be measured instead of the coming draft; the first behind
        `first_wait` drafts, since what they lost is only known then."""
        wait = self.wait if is_safe else min(self.wait, NARROW_WAIT)
        wait = wait if 0 in self.seen else min(wait, self.first_wait)
        if self.burst == 0 and self.since >= wait:
            self.burst = BURST
        return self.burst > 0

    def of(self, size: int) -> float:
        """The factor by which the table is wrong now: of that size, else of other drafts, else of
        plain rounds."""
        own = self.seen.get(size)
        if own is not None and (size == 0 or self._is_known(own)):
            return own.middle
        plain = self.seen.get(0)
        if not self.drafted.ratios:
            return 1.0 if plain is None else plain.middle
        if plain is not None and len(self.drafted.ratios) < NUM_FEW:  # the first wakes what slept
            return min(self.drafted.middle, OF_FEW * plain.middle)
        return self.drafted.middle

    def _is_known(self, own: Recent) -> bool:
        return len(own.ratios) >= NUM_FEW and self.round - own.at < OWN_ROUNDS


@dataclass(slots=True)
class Account:
    """What drafting has brought over plain decoding, in plain rounds of a row. It may be overdrawn
    by `allowance` and by an `overdraft` of all rounds so far, and holds at most `most`, so that
    long gains pay for no long loss."""

    allowance: float = 2.0
    overdraft: float = 0.005
    most: float = 8.0
    balance: float = 0.0
    rounds: int = 0

    def affords(self, loss: float) -> bool:
        """Whether a round may be played that could lose so much."""
        return loss <= self.balance + self.allowance + self.overdraft * self.rounds

    def until(self, loss: float) -> int:
        """Rounds from now on until it affords that, if nothing is booked meanwhile."""
        missing = loss - self.balance - self.allowance - self.overdraft * self.rounds
        return max(0, ceil(missing / max(self.overdraft, 1e-9)))

    @property
    def is_full(self) -> bool:
        return self.balance > 0.9 * self.most

    def book(self, tokens: float, cost: float) -> None:
        """A round that drafted: tokens per row, and what it cost in plain rounds."""
        self.balance = min(self.balance + tokens - cost, self.most)
