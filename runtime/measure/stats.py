"""The measures of speculative decoding; every report takes its words and formulas from here.

tau       tokens committed per target forward, the bonus or correction token included (plain = 1)
accepted  drafted tokens that were committed; never counts the bonus token
alpha     accepted / tested, where a round tests its accepted tokens and the first rejected one; per
          position: of those tested there, so rounds without a draft that deep do not count
MBSU      memory-bound speed-up, tau / (1 + g c): g sequential draft calls, c = bytes moved by the
          drafter / bytes moved by the target (VocabTrim, arXiv 2506.22694, in speed-up form)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.messages.printable import counted
from specctl.core.messages.table import Table, Tabled
from specctl.runtime.measure.doubt import FEW_COUNTS, counted_shares
from specctl.runtime.measure.spending import Spending


@dataclass(slots=True)
class RowStats:
    """Counters of one row. One writer: the engine."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    tested_at: list[int] = field(default_factory=list)

    def add(self, other: RowStats) -> None:
        """What another row did."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.tokens += other.tokens
        self.accepted_at = list(add_counts([self.accepted_at, other.accepted_at]))
        self.tested_at = list(add_counts([self.tested_at, other.tested_at]))

    def count(self, drafted: int, accepted: int, emitted: int, is_rejected: bool) -> None:
        """One round: nodes drafted, tokens accepted and emitted, and whether drafts that stood
        behind the last accepted token were all rejected."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += emitted
        tested = accepted + is_rejected
        while len(self.tested_at) < tested:
            self.tested_at.append(0)
            self.accepted_at.append(0)
        for position in range(tested):
            self.tested_at[position] += 1
        for position in range(accepted):
            self.accepted_at[position] += 1


@dataclass(slots=True)
class TurnCounts:
    """What two models did that write a text in turns (runtime/turns). `by_target`: turns whose text
    is the target's; `dropped`: tokens of the other one that did not stay; `spending`: of a budget.
    One writer: the loop."""

    turns: int = 0
    by_target: int = 0
    tokens: int = 0
    target_tokens: int = 0
    dropped: int = 0
    spending: Spending | None = None

    def count(self, tokens: int, is_target: bool) -> None:
        """A turn whose text stays."""
        self.turns += 1
        self.by_target += is_target
        self.tokens += tokens
        self.target_tokens += tokens * is_target

    @property
    def share(self) -> float:
        """Of the tokens, by the target."""
        return self.target_tokens / self.tokens if self.tokens else 0.0

    @property
    def spent(self) -> float | None:
        """By the costs of the budget, of what the target alone would need; None without one."""
        if self.spending is None:
            return None
        drafted = self.tokens - self.target_tokens + self.dropped
        return self.spending.spent(self.tokens, self.target_tokens, drafted)

    def lines(self) -> tuple[str, ...]:
        """Who wrote, and what a budget bought."""
        if self.spending is None or self.spent is None:
            return (str(self),)
        return str(self), f"spent {self.spent:.2f} of {self.spending}", self.spending.said_again

    def __str__(self) -> str:
        return (
            f"the target wrote {self.by_target:,} of {counted(self.turns, 'turn')}, "
            f"{self.share:.0%} of the tokens | {counted(self.dropped, 'token')} of the other model "
            "dropped"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "turns": self.turns,
            "by_target": self.by_target,
            "target_tokens": self.target_tokens,
            "target_share": round(self.share, 4),
            "dropped": self.dropped,
            **(
                {}
                if self.spending is None or self.spent is None
                else {"budget": {**self.spending.to_json(), "spent": round(self.spent, 4)}}
            ),
        }


@dataclass(slots=True)
class KeptCounts:
    """Tokens of prompts, and how many of them the target kept (runtime/kept_prompts). One writer:
    the loop."""

    tokens: int = 0
    kept: int = 0

    def count(self, tokens: int, kept: int) -> None:
        """A prompt."""
        self.tokens += tokens
        self.kept += kept

    def __str__(self) -> str:
        return f"{self.kept:,} of {counted(self.tokens, 'token')} of the prompts kept"

    def to_json(self) -> dict[str, Any]:
        return {"prompt_tokens": self.tokens, "kept_tokens": self.kept}


PARTS = ("controller", "turns", "kept")  # of a run's figures, with figures of their own


@dataclass(frozen=True, slots=True, repr=False)
class Stats(Tabled):
    """Counters and times of a whole run; the derived figures are properties."""

    rounds: int
    drafted: int
    accepted: int
    tokens: int
    accepted_at: tuple[int, ...]
    tested_at: tuple[int, ...]
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    verification: str
    repetition_rate: float
    controller: Mapping[str, Any] | None = None  # what each arm of a switch did
    turns: TurnCounts | None = None  # of a text that two models wrote in turns
    kept: KeptCounts | None = None  # of prompts of which the target kept a part

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def alpha(self) -> float:
        tested = sum(self.tested_at)
        return sum(self.accepted_at) / tested if tested else 0.0

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """alpha of each position by itself: accepted / tested there."""
        return shares(self.accepted_at, self.tested_at)

    @property
    def well_counted(self) -> tuple[float, ...]:
        """The same of the first positions, as far as each was tested often enough to be drawn."""
        return well_counted(self.accepted_at, self.tested_at)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def draft_share(self) -> float:
        """Share of decoding time spent drafting."""
        spent = self.draft_seconds + self.verify_seconds
        return self.draft_seconds / spent if spent else 0.0

    def lines(self) -> tuple[str, ...]:
        """What speculation did, how fast it was, and who wrote."""
        per_position = " ".join(counted_shares(self.accepted_at, self.tested_at)) or "-"
        return (
            f"tau {self.tau:.2f} | rounds {self.rounds:,} | drafted {self.drafted:,} | "
            f"accepted {self.accepted:,} | accepted per position {per_position}",
            f"{self.tokens:,} tokens in {self.seconds:.2f} s | "
            f"{self.tokens_per_second:.1f} tokens/s | drafting {self.draft_share:.0%} of the time "
            f"| repetition {self.repetition_rate:.2f} | verification {self.verification}",
            *(() if self.turns is None else self.turns.lines()),
            *(() if self.kept is None else (str(self.kept),)),
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def table(self) -> Table:
        """The figures by name."""
        figures = {k: v for k, v in self.to_json().items() if k not in PARTS}
        shares = " ".join(counted_shares(self.accepted_at, self.tested_at)) or "-"
        rows = [(k, shares if k == "accepted_per_position" else v) for k, v in figures.items()]
        return Table(("figure", "value"), rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "tau": round(self.tau, 4),
            "alpha": round(self.alpha, 4),
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_per_position": [round(x, 4) for x in self.accepted_per_position],
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "draft_share": round(self.draft_share, 4),
            "repetition_rate": round(self.repetition_rate, 4),
            "verification": self.verification,
            **({} if self.controller is None else {"controller": dict(self.controller)}),
            **({} if self.turns is None else {"turns": self.turns.to_json()}),
            **({} if self.kept is None else {"kept": self.kept.to_json()}),
        }


def busy_note(used: int, threads: int) -> str:
    """What is said of a run beside other work."""
    return (
        f"the cores were busy: the last steps ran on {used} of {counted(threads, 'thread')}, "
        "which was faster"
    )


def well_counted(accepted_at: Sequence[int], tested_at: Sequence[int]) -> tuple[float, ...]:
    """Accepted / tested at the positions that were tested often enough to be drawn."""
    pairs = zip(shares(accepted_at, tested_at), tested_at, strict=True)
    return tuple(share for share, tested in pairs if tested >= FEW_COUNTS)


def shares(accepted_at: Sequence[int], tested_at: Sequence[int]) -> tuple[float, ...]:
    """Accepted / tested of every position."""
    pairs = zip(accepted_at, tested_at, strict=True)
    return tuple(accepted / tested if tested else 0.0 for accepted, tested in pairs)


def add_counts(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Sum of count lists of different lengths."""
    total: list[int] = []
    for row in rows:
        total.extend([0] * (len(row) - len(total)))
        for position, count in enumerate(row):
            total[position] += count
    return tuple(total)


def repetition_rate(sequences: Iterable[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same sequence: 0 = never repeats itself. Small
    models loop under greedy decoding, which flatters n-gram drafters; tables state this beside tau.
    """
    repeated = total = 0
    for tokens in sequences:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(tokens) - n + 1):
            gram = tuple(tokens[start : start + n])
            repeated += gram in seen
            seen.add(gram)
            total += 1
    return repeated / total if total else 0.0


def expected_tau(alpha: float, length: int) -> float:
    """E[tokens per round] of a chain with constant acceptance: (1 - a^(k+1)) / (1 - a)."""
    if alpha >= 1.0:
        return float(length + 1)
    return float((1.0 - alpha ** (length + 1)) / (1.0 - alpha))


def memory_bound_speedup(tau: float, draft_calls: float, byte_ratio: float) -> float:
    """MBSU = tau / (1 + g c); tends to tau as the drafter gets free."""
    return tau / (1.0 + draft_calls * byte_ratio)
