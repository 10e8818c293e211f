"""What trimming did to each domain, the worst first: the long tail is where a small head loses.

Speed-ups take measured rounds and the fitted cost of a round, which is steadier than one timed run;
a prompt is slower when its rounds times that cost have grown. MBSU is memory-bound (VocabTrim).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specctl.runtime.measure.stats import memory_bound_speedup
from specctl.train.vocab.head_cost import HeadCost
from specctl.train.vocab.measure import MeasuredDrafter

ALL = "all"


@dataclass(frozen=True, slots=True)
class Moved:
    """Sequential draft calls of a round, and draft bytes / target bytes of each."""

    calls: int
    byte_ratio: float

    def mbsu(self, tau: float) -> float:
        return memory_bound_speedup(tau, self.calls, self.byte_ratio)


@dataclass(frozen=True, slots=True)
class Side:
    """A drafter as it was, or as it is now: what it achieved and what a round of it costs."""

    measured: MeasuredDrafter
    cost: HeadCost
    size: int
    moved: Moved


@dataclass(frozen=True, slots=True)
class Figures:
    """One side of one domain."""

    tau: float
    alpha: float
    mbsu: float
    speedup: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class DomainRow:
    """One domain before and after; `slower` is the share of its prompts that lost."""

    domain: str
    prompts: int
    coverage: float | None
    slower: float
    before: Figures
    after: Figures

    @property
    def gain(self) -> float:
        """Speed-up of the trimmed over the whole drafter."""
        return self.after.speedup / self.before.speedup

    def to_json(self) -> dict[str, Any]:
        rounded = {
            name: {k: round(v, 4) for k, v in asdict(side).items()}
            for name, side in (("before", self.before), ("after", self.after))
        }
        return {
            "domain": self.domain,
            "prompts": self.prompts,
            "coverage": None if self.coverage is None else round(self.coverage, 5),
            "slower": round(self.slower, 4),
            "gain": round(self.gain, 4),
            **rounded,
        }


def domain_rows(before: Side, after: Side, coverage: Mapping[str, float]) -> tuple[DomainRow, ...]:
    """All prompts first, then every measured domain, the smallest gain first. `coverage` by domain,
    `ALL` included; None where a measured domain was not counted."""
    names = sorted({run.domain for run in before.measured.by_prompt})
    rows = [_row(name, before, after, coverage) for name in names]
    rows.sort(key=lambda row: row.gain)
    return (_row(ALL, before, after, coverage), *rows) if rows else ()


def _row(name: str, before: Side, after: Side, coverage: Mapping[str, float]) -> DomainRow:
    pairs = [
        (b, a)
        for b, a in zip(before.measured.by_prompt, after.measured.by_prompt, strict=True)
        if name in (ALL, b.domain)
    ]
    seconds = [side.cost.round_seconds(side.size) for side in (before, after)]
    slower = sum(a.rounds * seconds[1] > b.rounds * seconds[0] for b, a in pairs)
    return DomainRow(
        name,
        len(pairs),
        coverage.get(name),
        slower / len(pairs),
        _figures(before, name),
        _figures(after, name),
    )


def _figures(side: Side, name: str) -> Figures:
    measured = side.measured if name == ALL else side.measured.domain(name)
    return Figures(
        measured.tau,
        measured.alpha,
        side.moved.mbsu(measured.tau),
        side.cost.speedup(measured.tau, side.size),
        measured.tokens_per_second,
    )
