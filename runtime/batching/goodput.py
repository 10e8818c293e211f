"""Goodput: the draft lengths that emit most tokens per second, the whole batch considered.

SmartSpec ("Optimizing speculative decoding for serving large language models using goodput", Liu et
al., arXiv 2406.14066): G = sum over rows of l(alpha_r, k_r) / T(batch, k), where
l(alpha, k) = (1 - alpha^(k + 1)) / (1 - alpha) is what a row is expected to emit. T comes from the
table measured on this device, alpha_r from earlier rounds. A round costs what its deepest row
costs, so the search is over that depth k; rows share it as far as it is of use to them. At high
load a verified token costs as much as an emitted one, and k = 0 wins: then speculation is off, and
a probe now and then (ever more seldom) tells whether acceptance has changed. That fewer rows are
left is noticed without a probe.

What rounds cost is corrected by the rounds of this run, depth by depth, as the device may serve
others too; a plain round comes now and then for the comparison, and an account of what drafting has
won bounds what it may lose (`runtime/measure/live_costs.py`).

While a row drafts nothing its drafter sleeps, and must read what it missed before it drafts again.
What a position costs to read is learned; a depth must pay for it within the next `HORIZON` rounds,
so that speculation does not come and go, and a probe asks those rows that have missed least.

`Forecast` holds what was expected of rounds against what they did. Goodput is tokens emitted per
second of the rounds (drafting, verification, and what the drafter had missed), all rows together;
prompts that the target reads are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.runtime.batching.base import BatchingEntry, RowView
from specctl.runtime.batching.history import History
from specctl.runtime.measure.cost_table import BatchCosts
from specctl.runtime.measure.live_costs import HORIZON, Account, Ratios
from specctl.runtime.measure.stats import expected_tau


@dataclass(slots=True)
class Forecast:
    """Sums over rounds. One writer: the policy that owns it."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen_tokens: int = 0
    seen_seconds: float = 0.0

    def expect(self, tokens: float, seconds: float) -> None:
        """Of the coming round."""
        self.tokens += tokens
        self.seconds += seconds

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """The round that was expected last."""
        self.seen_tokens += sum(len(new) for new in outcome.emitted)
        self.seen_seconds += seconds.draft + seconds.verify + seconds.wake

    def to_json(self) -> dict[str, float] | None:
        """Tokens per second; None before a round is over."""
        if min(self.seconds, self.seen_seconds) <= 0:
            return None
        predicted, measured = self.tokens / self.seconds, self.seen_tokens / self.seen_seconds
        return {
            "predicted": round(predicted, 2),
            "measured": round(measured, 2),
            "measured_over_predicted": round(measured / predicted, 4),
        }


MEMORY = 0.9  # of the running times
FEWEST = 4  # rows of a probe


@dataclass(slots=True)
class Goodput:
    """Drafts at most `longest` tokens; a level must be reached with a chance of `worth` or more.
    While speculation is off, a probe of `probe_length` comes after `probe_first` rounds, then after
    twice as many, up to `probe_last`."""

    costs: BatchCosts
    longest: int
    worth: float = 0.01
    probe_length: int = 1
    probe_first: int = 16
    probe_last: int = 512
    history: History = field(default_factory=History)
    forecast: Forecast = field(default_factory=Forecast)
    ratios: Ratios = field(default_factory=Ratios)
    account: Account = field(default_factory=Account)
    rounds: int = 0
    rounds_off: int = 0
    _since: int = 0  # rounds without a draft
    _wait: int = 0  # of which so many come before the next probe
    _known: dict[tuple[int, int], float] = field(default_factory=dict)
    _asked_depth: int = 0
    _predicted: float = 0.0
    _num_rows: int = 0
    _ratio: float | None = None
    _missed: int = 0  # positions that the rows of this round have their drafter read
    _read: int = 0  # positions that were read, in so many seconds
    _reading: float = 0.0

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        self.rounds += 1
        self.account.rounds += 1
        alphas = [self.history.alpha(row.index) for row in rows]
        depth = self._best(rows, alphas)
        is_measured = depth > 0 and self.ratios.wants_plain(self.account.is_full)
        depth = 0 if is_measured else depth
        lengths = [
            row.at_most(min(depth, reach(alpha, self.worth)))
            for row, alpha in zip(rows, alphas, strict=True)
        ]
        if any(lengths):
            self._since = self._wait = 0
        elif not is_measured:
            self.rounds_off += 1
            probe = self._probe(len(rows))
            chosen = self._asked(rows) if probe else ()
            lengths = [row.at_most(probe) if r in chosen else 0 for r, row in enumerate(rows)]
        self._expect(rows, alphas, lengths)
        return self.history.ask(rows, lengths)

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        return self._best(rows, [self.history.alpha(row.index) for row in rows]) > 0

    def _expect(
        self, rows: Sequence[RowView], alphas: Sequence[float], lengths: Sequence[int]
    ) -> None:
        self._missed = sum(row.missed for row, k in zip(rows, lengths, strict=True) if k)
        self._asked_depth = max(lengths, default=0)
        self._predicted = self._seconds(len(rows), self._asked_depth)
        self._num_rows = len(rows)
        tokens = sum(expected_tau(alpha, k) for alpha, k in zip(alphas, lengths, strict=True))
        seconds = self._cost(len(rows), self._asked_depth) + self._missed * self._price()
        self.forecast.expect(tokens, seconds)

    def _best(self, rows: Sequence[RowView], alphas: Sequence[float]) -> int:
        """The depth with the highest goodput; the shorter one of equals."""

        late = (row.missed / min(HORIZON, row.room) for row in rows if row.at_most(1))
        reading = self._price() * sum(late)

        def goodput(depth: int) -> float:
            pairs = zip(rows, alphas, strict=True)
            tokens = sum(expected_tau(alpha, row.at_most(depth)) for row, alpha in pairs)
            seconds = self._cost(len(rows), depth)
            return tokens / (seconds + (reading if depth else 0.0))

        depths = [k for k in range(1, self.longest + 1) if self._affords(len(rows), k)]
        return max((0, *depths), key=goodput)

    def _affords(self, rows: int, depth: int) -> bool:
        """Whether the account bears that all of such a draft is rejected."""
        return self.account.affords(self._cost(rows, depth) / self._cost(rows, 0) - 1.0)

    def _cost(self, rows: int, depth: int) -> float:
        """Seconds of such a round here and now: others use the device, too."""
        return self.ratios.of(depth) * self._seconds(rows, depth)

    def _seconds(self, rows: int, length: int) -> float:
        if (rows, length) not in self._known:
            self._known[rows, length] = self.costs.seconds(rows, length)
        return self._known[rows, length]

    def _price(self) -> float:
        """Seconds to read a missed position; before any was read, those to draft and verify one of
        many, as positions are read together."""
        if self._read:
            return self._reading / self._read
        rows = max(self.costs.tables)
        return max(0.0, self._cost(rows, 1) - self._cost(rows, 0)) / rows

    def _asked(self, rows: Sequence[RowView]) -> set[int]:
        """Whom a probe asks: as many as can be read up in the time of the probe itself."""
        price = self._price()
        left = self._cost(len(rows), 1) - self._cost(len(rows), 0)
        able = (r for r, row in enumerate(rows) if row.at_most(1))
        found: set[int] = set()
        for r in sorted(able, key=lambda r: rows[r].missed):
            left -= price * rows[r].missed
            if left < 0 and len(found) >= FEWEST:
                break
            found.add(r)
        return found

    def _probe(self, rows: int) -> int:
        """The length of this round, in which nothing is worth drafting."""
        self._since, self._wait = self._since + 1, self._wait or self.probe_first
        if self._since < self._wait or not self._affords(rows, self.probe_length):
            return 0
        self._since, self._wait = 0, min(2 * self._wait, self.probe_last)
        return self.probe_length

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.history.observe(outcome)
        self.forecast.observe(outcome, seconds)
        if self._missed:
            self._read += self._missed
            self._reading += seconds.wake
        spent = seconds.draft + seconds.verify
        ratio = spent / self._predicted
        self.ratios.observe(self._asked_depth, ratio)
        if self._asked_depth:
            usual = self.ratios.of(self._asked_depth) * self._predicted
            tokens = 1.0 + sum(outcome.num_accepted) / max(len(outcome.num_accepted), 1)
            plain = self._cost(self._num_rows, 0)
            self.account.book(tokens, (min(spent, 3.0 * usual) + seconds.wake) / plain)
        before = ratio if self._ratio is None else self._ratio
        self._ratio = MEMORY * before + (1 - MEMORY) * ratio

    def to_json(self) -> Mapping[str, Any]:
        """`time_ratio`: measured over predicted seconds of the last rounds; `goodput`: of all."""
        return {
            "batching": "goodput",
            "acceptance": round(self.history.mean, 4),
            "rounds": self.rounds,
            "rounds_off": self.rounds_off,
            "time_ratio": None if self._ratio is None else round(self._ratio, 3),
            "goodput": self.forecast.to_json(),
        }


def reach(alpha: float, worth: float) -> int:
    """How many levels are reached with a chance of at least `worth`: alpha^k >= worth."""
    return int(log(worth) / log(alpha))


BATCHING = BatchingEntry(
    "goodput",
    "the lengths with most tokens per second",
    "https://arxiv.org/abs/2406.14066",
    lambda depth, costs: Goodput(costs, depth),
    reads_costs=True,
)
