"""What a benchmark found, as rows, tables, JSON and Markdown.

The first contender is the baseline of every ratio. "+-" is a standard error over questions
(timed.py says how).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

from specctl.core.messages.printable import counted
from specctl.core.messages.table import Table, Tabled
from specctl.runtime.measure.doubt import FEW_COUNTS, PAYS
from specctl.runtime.measure.roof import Roof
from specctl.runtime.measure.round_cost import RoundCost
from specctl.runtime.measure.stats import busy_note
from specctl.runtime.measure.timed import CONTEXTS, Timed, context_name
from specctl.runtime.target.variants.inflate import inflated_note

Runs = dict[str, list[dict[str, Timed]]]  # contender -> runs -> category
BAR = 12  # characters of the longest bar
MOST_POSITIONS = 12  # columns of a table


@dataclass(frozen=True, slots=True)
class CategoryFigures:
    """What was measured of one contender and setting in one category of questions."""

    category: str
    tau: float | None
    tau_error: float | None
    tokens_per_second: float
    speedup: float
    speedup_error: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "category": self.category,
            "tau": rounded(self.tau),
            "tau_error": rounded(self.tau_error),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "speedup": round(self.speedup, 3),
            "speedup_error": rounded(self.speedup_error),
        }


@dataclass(frozen=True, slots=True)
class BenchRow:
    """What was measured of one contender in one setting; `doubts` say why its speed-up is no
    finding yet. Errors are None where they are unknown: of a single question, and the speed-up's
    where several are decoded together. `context_tokens` and `context_rounds` are by range of
    context (`timed.CONTEXTS`). `verification`: class and rule of its answers, such as
    lossless:greedy or approximate:fly:0.5; None of another program's. `round_cost`: where the time
    of a round goes; None of plain decoding and where it is not known. `decoding_rate`: tokens a
    second without the time for reading prompts, if known."""

    name: str
    setting: str
    tau: float | None
    tokens_per_second: float
    speedup: float
    repetition_rate: float
    identical: bool | None
    draft_share: float | None
    accepted_per_position: tuple[float, ...]
    well_counted: tuple[float, ...] = ()
    doubts: tuple[str, ...] = ()
    tested_at: tuple[int, ...] = ()
    tau_error: float | None = None
    speedup_error: float | None = None
    context_tokens: tuple[int, ...] = ()
    context_rounds: tuple[int, ...] = ()
    categories: tuple[CategoryFigures, ...] = ()
    verification: str | None = None
    round_cost: RoundCost | None = None
    decoding_rate: float | None = None

    @property
    def shown(self) -> str:
        """The name, with the mark of answers that are not the target's own."""
        is_own = not (self.verification or "").startswith("approximate")
        return self.name if is_own else f"{self.name} (approximate)"

    @property
    def is_winner(self) -> bool:
        """Whether it was clearly faster than the baseline."""
        return self.speedup > PAYS and not self.doubts

    @property
    def position_errors(self) -> tuple[float, ...]:
        """Standard errors of acceptance by position, each of as many tests as there were."""
        pairs = zip(self.accepted_per_position, self.tested_at, strict=False)
        return tuple(sqrt(share * (1 - share) / max(1, tested)) for share, tested in pairs)

    def context_taus(self) -> Iterator[tuple[int, float, int]]:
        """Index of a range of contexts, tau and rounds, of those that were seen."""
        pairs = zip(self.context_tokens, self.context_rounds, strict=True)
        for index, (tokens, rounds) in enumerate(pairs):
            if rounds:
                yield index, tokens / rounds, rounds

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "setting": self.setting,
            "tau": rounded(self.tau),
            "tau_error": rounded(self.tau_error),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "speedup": round(self.speedup, 3),
            "speedup_error": rounded(self.speedup_error),
            "repetition_rate": round(self.repetition_rate, 3),
            "identical_to_plain": self.identical,
            "draft_share": rounded(self.draft_share),
            "accepted_per_position": [round(x, 3) for x in self.accepted_per_position],
            "tested_per_position": list(self.tested_at),
            "by_context": [
                {"context": context_name(i), "from": CONTEXTS[i], "tau": round(tau, 3),
                 "rounds": rounds}
                for i, tau, rounds in self.context_taus()
            ],
            "by_category": [one.to_json() for one in self.categories],
            "doubts": list(self.doubts),
            "verification": self.verification,
            "decoding_rate": rounded(self.decoding_rate),
            "round": None if self.round_cost is None else self.round_cost.to_json(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class BenchReport(Tabled):
    """Rows by setting and contender. `categories`: how many questions each had; `suites`: which
    public suites they are of; `chat`: whether prompts were turns of a chat (None: some of them);
    `notes`: what is to be known of the questions; `roof`: what reading the weights allows, if that
    is known."""

    rows: tuple[BenchRow, ...]
    target: str
    inflated: str | None
    dtype: str
    device: str
    threads: int
    threads_used: int  # at the end, where other work kept the cores busy
    num_prompts: int
    new_tokens: int
    repeats: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # of wall time, by part
    categories: Mapping[str, int] = field(default_factory=dict)
    suites: tuple[str, ...] = ()
    chat: bool | None = False
    notes: tuple[str, ...] = ()
    roof: Roof | None = None

    def after(self, part: str, seconds: float) -> BenchReport:
        """This report with what was done before it, in that time."""
        return replace(self, seconds={part: seconds, **self.seconds})

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.setting for row in self.rows))

    @property
    def best(self) -> list[BenchRow]:
        """The fastest drafter of every setting."""
        drafted = [row for row in self.rows if row.round_cost is not None]
        by_setting = {s: [row for row in drafted if row.setting == s] for s in self.settings}
        return [max(rows, key=lambda row: row.speedup) for rows in by_setting.values() if rows]

    def table(self) -> Table:
        """A row for every contender and setting."""
        columns = (
            "drafter", "sampling", "tau", "tokens/s", "speed-up", "identical", "repetition",
            "drafting",
        )  # fmt: skip
        rows = [
            (
                row.shown,
                row.setting,
                with_error(row.tau, row.tau_error if self.suites else None),
                f"{row.tokens_per_second:.1f}",
                with_error(row.speedup, row.speedup_error if self.suites else None),
                row.identical,
                row.repetition_rate,
                None if row.draft_share is None else f"{row.draft_share:.0%}",
            )
            for row in self.rows
        ]
        return Table(columns, rows, self._notes())

    def _notes(self) -> list[str]:
        notes = [
            f"{self.target} {self.dtype} on {self.device}, {counted(self.threads, 'thread')}, "
            f"{counted(self.num_prompts, 'prompt')} x {counted(self.new_tokens, 'token')}, "
            + (f"medians of {self.repeats} runs" if self.repeats > 1 else "one run of each")
            + (", as turns of a chat" if self.chat else "")
        ]
        notes += self.notes
        relaxed = {row.shown: row.verification for row in self.rows if row.shown != row.name}
        notes += [
            f"{name}: its answers are not the target's own ({mark}), so its figures are no "
            "lossless ones"
            for name, mark in relaxed.items()
        ]
        plain = self.rows[0].decoding_rate if self.rows else None
        if self.roof is not None and plain is not None:
            notes.append(self.roof.text(plain))
        for row in self.best:
            if row.round_cost is not None:
                notes.append(f"{row.shown}, {row.setting}: {row.round_cost.text()}")
        doubtful = [row for row in self.rows if row.doubts]
        notes += [f"doubtful: {r.name}, {r.setting}: {'; '.join(r.doubts)}" for r in doubtful]
        if self.threads_used < self.threads:
            notes.append(busy_note(self.threads_used, self.threads))
        if self.seconds:
            parts = ", ".join(f"{name} {spent:.0f}" for name, spent in self.seconds.items())
            notes.append(f"{sum(self.seconds.values()):.0f} seconds in all: {parts}")
        if self.inflated is not None:
            notes.append(inflated_note(self.target, self.inflated))
        return notes

    def details(self) -> dict[str, Table]:
        """By title: speed-up and tau by category, acceptance by position, tau by context."""
        drafted = [row for row in self.rows if row.tau is not None and any(row.tested_at)]
        found = {
            f"Speed-up (tau) by category, {setting}": self._by_category(setting)
            for setting in self.settings
        }
        found["A round, in plain tokens"] = _by_part(self.rows)
        for row in self.best:
            if row.round_cost is not None:
                title = f"Limits of {row.shown}, {row.setting} (times plain, without the prompts)"
                found[title] = bars(row.round_cost.limits)
        found["Acceptance by position"] = _by_position(drafted)
        found["tau by tokens in the context"] = _by_context(drafted)
        return {title: table for title, table in found.items() if table.rows}

    def _by_category(self, setting: str) -> Table:
        names = [*self.categories]
        columns = ("drafter", *(f"{name} ({self.categories[name]})" for name in names))
        rows = [
            (row.shown, *(_in_short(row.categories, name) for name in names))
            for row in self.rows
            if row.setting == setting
        ]
        return Table(columns, rows if len(names) > 1 else [])

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "inflated": self.inflated,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "threads_used": self.threads_used,
            "suites": list(self.suites),
            "chat": self.chat,
            "num_prompts": self.num_prompts,
            "categories": dict(self.categories),
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "seconds": {name: round(spent, 1) for name, spent in self.seconds.items()},
            "notes": list(self.notes),
            "roof": None if self.roof is None else self.roof.to_json(),
            "rows": [row.to_json() for row in self.rows],
        }


def with_error(value: float | None, error: float | None) -> str | float | None:
    """A figure with its standard error."""
    return value if value is None or error is None else f"{value:.2f} +- {error:.2f}"


def _in_short(categories: Sequence[CategoryFigures], name: str) -> str | None:
    """The figures of that category; None where the run was stopped before it."""
    figures = next((one for one in categories if one.category == name), None)
    if figures is None:
        return None
    tau = "-" if figures.tau is None else f"{figures.tau:.2f}"
    return f"{figures.speedup:.2f} ({tau})"


def rounded(value: float | None) -> float | None:
    """To three places."""
    return None if value is None else round(value, 3)


def _by_position(rows: Sequence[BenchRow]) -> Table:
    longest = min(MOST_POSITIONS, max((len(row.tested_at) for row in rows), default=0))
    columns = ("drafter", "sampling", *map(str, range(1, longest + 1)))
    return Table(columns, [(row.shown, row.setting, *_shares(row, longest)) for row in rows])


def _by_part(rows: Sequence[BenchRow]) -> Table:
    """What a round costs, and what it brings."""
    columns = (
        "drafter", "sampling", "drafted", "tau", "target's pass", "drafting", "rest", "in all",
    )  # fmt: skip
    pairs = [(row, row.round_cost) for row in rows]
    return Table(
        columns,
        [
            (row.shown, row.setting, one.drafted, one.tau, one.verifying, one.drafting, one.rest,
             one.total)
            for row, one in pairs
            if one is not None
        ],
    )  # fmt: skip


def bars(values: Mapping[str, float]) -> Table:
    """Each value with a bar as long as it is large."""
    most = max(values.values())
    rows = [(name, value, "#" * round(BAR * value / most)) for name, value in values.items()]
    return Table(("it would be", "times", ""), rows)


def _shares(row: BenchRow, longest: int) -> list[str | None]:
    """Of every position; one that was tested too seldom says how often."""
    triples = zip(row.accepted_per_position, row.position_errors, row.tested_at, strict=True)
    found: list[str | None] = [
        f"{share:.2f} +- {error:.2f}" if tested >= FEW_COUNTS else f"of {tested}"
        for share, error, tested in triples
    ]
    return [*found[:longest], *[None] * (longest - len(found))]


def _by_context(rows: Sequence[BenchRow]) -> Table:
    seen = sorted({index for row in rows for index, _, _ in row.context_taus()})
    columns = ("drafter", "sampling", *map(context_name, seen))
    found = []
    for row in rows:
        taus = {index: tau for index, tau, _ in row.context_taus()}
        found.append((row.shown, row.setting, *(taus.get(index) for index in seen)))
    return Table(columns, found)
