"""What trimming a draft vocabulary did: to each domain, the worst first (the long tail is where a
small head loses), and by size; how to show it.

Speed-ups take measured rounds and the fitted cost of a round, which is steadier than one timed run;
a prompt is slower when its rounds times that cost have grown. MBSU is memory-bound (VocabTrim).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.messages.installed import pip_install
from specctl.core.messages.sizes import size_text
from specctl.runtime.measure.stats import memory_bound_speedup
from specctl.train.vocab.candidates import TrimChoice, TrimTrial
from specctl.train.vocab.measure import HeadCost, MeasuredDrafter

ALL = "all"


@dataclass(frozen=True, slots=True)
class Moved:
    """Sequential draft calls of a round, draft bytes / target bytes of each, and the former."""

    calls: int
    byte_ratio: float
    draft_bytes: int

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


BAR = 40
MBSU_FORMULA = "MBSU = tau / (1 + g c), g draft calls per round, c = drafter bytes / target bytes"
SPEEDUP_FORMULA = "S(k) = tau(k) / (c_verify + g (c_body + c_head k / V))"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The `size` best ids: coverage over all and in the worst domain; predicted acceptance, tau and
    speed-up."""

    size: int
    coverage: float
    worst: float
    alpha: float
    tau: float
    speedup: float


@dataclass(frozen=True, slots=True)
class TrimReport:
    """Everything about one trimming. `coverage` is of text that was not ranked, `unseen` kept ids
    were never counted, `predictor` says where predicted tau came from."""

    family: str
    selector: str
    search: str
    predictor: str
    temperature: float
    choice: TrimChoice
    size_before: int
    target_size: int
    digest: str | None
    tokens_ranked: int
    tokens_heldout: int
    special: int
    unseen: int
    coverage: float
    coverage_by_domain: Mapping[str, float]
    curve: tuple[CurvePoint, ...]
    before: Side
    after: Side
    trials: tuple[TrimTrial, ...]
    min_coverage: float | None
    domains: tuple[DomainRow, ...] = field(default=())

    @property
    def size(self) -> int:
        return self.choice.size

    @property
    def pays(self) -> bool:
        """Whether a smaller vocabulary than before was chosen."""
        return self.size < self.size_before

    @property
    def before_speedup(self) -> float:
        """Over plain decoding, of the whole drafter: measured tau at the fitted cost."""
        return self.before.cost.speedup(self.before.measured.tau, self.before.size)

    @property
    def after_speedup(self) -> float:
        """The same of the trimmed one."""
        return self.after.cost.speedup(self.after.measured.tau, self.after.size)

    @property
    def agreement(self) -> float | None:
        """Kendall's tau between predicted and measured speed-ups of what was tried."""
        return kendall([(t.predicted.speedup, t.speedup) for t in self.trials])

    def to_json(self) -> dict[str, Any]:
        plain = (
            "family", "selector", "search", "predictor", "temperature", "size", "size_before",
            "target_size", "digest", "tokens_ranked", "tokens_heldout", "special", "unseen",
            "min_coverage",
        )  # fmt: skip
        before, after = self.before, self.after
        return {
            **{name: getattr(self, name) for name in plain},
            "length": self.choice.length,
            "weights": {name: round(w, 3) for name, w in self.choice.weights.items()},
            "calls": after.moved.calls,
            "coverage": round(self.coverage, 5),
            "coverage_by_domain": {k: round(v, 5) for k, v in self.coverage_by_domain.items()},
            "curve": [
                {k: v if k == "size" else round(v, 5) for k, v in asdict(point).items()}
                for point in self.curve
            ],
            "byte_ratio": {"before": before.moved.byte_ratio, "after": after.moved.byte_ratio},
            "draft_bytes": {"before": before.moved.draft_bytes, "after": after.moved.draft_bytes},
            "mbsu": {
                "before": before.moved.mbsu(before.measured.tau),
                "after": after.moved.mbsu(after.measured.tau),
                "formula": MBSU_FORMULA,
            },
            "before": before.measured.to_json(),
            "after": after.measured.to_json(),
            "domains": [row.to_json() for row in self.domains],
            "cost": after.cost.to_json() | {"formula": SPEEDUP_FORMULA},
            "trials": [trial.to_json() for trial in self.trials],
            "agreement": self.agreement,
        }

    def lines(self) -> list[str]:
        """The report in a few lines of text."""
        verdict = (
            f"kept {self.size:,} of {self.size_before:,} ids"
            if self.pays
            else f"all {self.size_before:,} ids kept: on this device no smaller head pays"
        )
        domains = ", ".join(f"{name} {value:.2%}" for name, value in self._worst_first())
        before, after = self.before.measured, self.after.measured
        ratios = [side.moved.byte_ratio for side in (self.before, self.after)]
        sizes = [size_text(side.moved.draft_bytes) for side in (self.before, self.after)]
        mbsu = [side.moved.mbsu(side.measured.tau) for side in (self.before, self.after)]
        return [
            f"{verdict} ({self.special} special, {self.unseen:,} never seen), "
            f"selected by {self.selector}" + self._choice_note(),
            f"coverage {self.coverage:.2%} of {self.tokens_heldout:,} tokens that were not ranked "
            f"(long tail lost: {1 - self.coverage:.2%}); by domain: {domains}",
            f"tau {before.tau:.3f} -> {after.tau:.3f}, alpha {before.alpha:.3f} -> "
            f"{after.alpha:.3f}, {before.tokens_per_second:,.0f} -> "
            f"{after.tokens_per_second:,.0f} tok/s",
            f"weights of a draft call: {sizes[0]} -> {sizes[1]}",
            f"MBSU {mbsu[0]:.3f} -> {mbsu[1]:.3f} (c {ratios[0]:.4f} -> {ratios[1]:.4f}, "
            f"g {self.after.moved.calls}; {MBSU_FORMULA})",
            *self.domain_table(),
            f"tried, predicted from {self.predictor}:",
            *self.table(),
        ]

    def _choice_note(self) -> str:
        if self.search != "tpe":
            return ""
        weights = ", ".join(f"{name} {w:.2f}" for name, w in self.choice.weights.items())
        return f", drafting {self.choice.length}" + (f", weights {weights}" if weights else "")

    def warnings(self, min_coverage: float) -> list[str]:
        """What speaks against the trimmed drafter: measured tau at measured costs below that of the
        whole one, over all prompts or in a domain; and less than `min_coverage` of the target's own
        words, which `--size auto` would not have gone below."""
        found = []
        if self.pays and self.after_speedup < self.before_speedup:
            found.append(
                f"the whole drafter is faster here: speed-up {self.before_speedup:.2f} -> "
                f"{self.after_speedup:.2f}, tau {self.before.measured.tau:.2f} -> "
                f"{self.after.measured.tau:.2f}; keep it, or trim with --size auto"
            )
        if self.pays and self.coverage < min_coverage:
            found.append(
                f"{self.size:,} ids are {self.coverage:.1%} of what the target writes, less than "
                f"the {min_coverage:.0%} that --size auto keeps: every other token ends a draft"
            )
        losers = [row for row in self.domains if row.gain < 1.0 and row.domain != ALL]
        if losers:
            row = min(losers, key=lambda row: row.gain)
            found.append(
                f"{row.domain} is slower than before ({row.gain:.3f}x): keep more ids, or count "
                "more of that text"
            )
        if max(trial.speedup for trial in self.trials) < 1.0:
            best = max(trial.speedup for trial in self.trials)
            found.append(
                "even so, decoding without this drafter is faster on this target "
                f"({best:.2f}x): train it longer, or draft fewer tokens"
            )
        return found

    def domain_table(self) -> list[str]:
        """Every domain before and after, the worst first behind the total."""
        if not self.domains:
            return []
        lines = [
            "  domain        coverage    alpha             tau               MBSU"
            "              S                 tok/s           slower"
        ]
        for row in self.domains:
            b, a = row.before, row.after
            covered = "      -" if row.coverage is None else f"{row.coverage:>7.2%}"
            pairs = [
                (b.alpha, a.alpha), (b.tau, a.tau), (b.mbsu, a.mbsu), (b.speedup, a.speedup),
            ]  # fmt: skip
            shown = "   ".join(f"{x:>6.3f} -> {y:<6.3f}" for x, y in pairs)
            speeds = f"{b.tokens_per_second:>5,.0f} -> {a.tokens_per_second:<5,.0f}"
            lines.append(
                f"  {row.domain[:12]:<12}  {covered} {shown}   {speeds}   {row.slower:>4.0%}"
            )
        return lines

    def table(self) -> list[str]:
        """Predicted against measured, best choice first."""
        lines = [
            "  kept  draft   coverage   alpha pred/meas   tau pred/meas    S pred/meas     tok/s"
        ]
        for trial in self.trials:
            p, m = trial.predicted, trial.measured
            lines.append(
                f"{p.size:>6,}  {trial.choice.length:>5}   {p.coverage:>7.2%}   "
                f"{p.alpha:>6.3f} / {m.alpha:<6.3f}   {p.tau:>6.3f} / {m.tau:<6.3f}  "
                f"{p.speedup:>6.3f} / {trial.speedup:<6.3f}  {m.tokens_per_second:>6,.0f}"
            )
        return lines

    def _worst_first(self) -> list[tuple[str, float]]:
        return sorted(self.coverage_by_domain.items(), key=lambda item: item[1])

    def plot(self) -> str:
        """The coverage curve for a terminal: plotext (6 or newer) where installed, else bars."""
        try:
            import plotext
        except ImportError:
            return self.bars()
        if not hasattr(plotext, "figure"):
            return self.bars()
        figure = plotext.figure
        figure.clear()
        figure.plot_size(72, 16)
        sizes = [point.size for point in self.curve]
        values = {"*": [p.coverage for p in self.curve], ".": [p.worst for p in self.curve]}
        for marker, shares in values.items():
            signal = figure.signal(sizes, [100 * share for share in shares], marker=marker)
            signal.lines()
            figure.draw(signal)
        figure.title("coverage in % by ids kept: * all domains  . worst domain")
        return str(plotext.uncolorize(str(figure.build())))

    def bars(self) -> str:
        """The coverage curve as one bar per size; `<` marks the size chosen."""
        lines = []
        for point in self.curve:
            bar = "#" * round(BAR * point.coverage)
            chosen = " <" if point.size == self.size else ""
            lines.append(
                f"{point.size:>8,} {point.coverage:>7.2%} |{bar:<{BAR}}| tau {point.tau:.2f} "
                f"S {point.speedup:.2f}{chosen}"
            )
        return "\n".join(lines)

    def save_png(self, path: Path) -> Path:
        """Coverage, predicted tau and predicted speed-up over the ids kept, each on its own axes;
        needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SpecctlError(
                "drawing the coverage curve needs matplotlib", do=pip_install("plots")
            ) from error
        figure = Figure(figsize=(7, 8.4), layout="constrained")
        figure.suptitle("What a smaller draft vocabulary keeps and gains", fontsize=13)
        upper, middle, lower = figure.subplots(3, 1, sharex=True)
        sizes = [point.size for point in self.curve]
        upper.plot(sizes, [100 * p.coverage for p in self.curve], marker="o", label="all domains")
        upper.plot(sizes, [100 * p.worst for p in self.curve], ls="--", label="worst domain")
        upper.set(ylabel="coverage (% of held-out tokens)")
        middle.plot(sizes, [p.tau for p in self.curve], marker="o", label="predicted")
        middle.set(ylabel="tau (tokens per target forward)")
        lower.plot(sizes, [p.speedup for p in self.curve], marker="o", label="predicted")
        tried = [(t.predicted.size, t.speedup) for t in self.trials]
        if tried:
            lower.scatter(*zip(*tried, strict=True), color="k", zorder=3, label="with measured tau")
        lower.set(
            xscale="log", xlabel="ids kept in the draft vocabulary",
            ylabel="speed-up (times plain decoding)",
        )  # fmt: skip
        lower.set_xticks(ticks := _ticks(sizes), [f"{size:,}" for size in ticks])
        lower.minorticks_off()
        for axes in (upper, middle, lower):
            axes.axvline(self.size, color="0.6", lw=1, label=f"chosen: {self.size:,}")
            axes.grid(axis="y", color="0.9")
            axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        return path


def _ticks(sizes: Sequence[int]) -> list[int]:
    """Sizes to be named below an axis of logarithms: none less than 1.4 times the one before."""
    ticks: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not ticks or ticks[-1] >= 1.4 * size:
            ticks.append(size)
    return ticks[::-1]


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of two rankings; None with fewer than two pairs or nothing to tell apart."""
    signs = [
        ((a > c) - (a < c), (b > d) - (b < d))
        for i, (a, b) in enumerate(pairs)
        for c, d in pairs[i + 1 :]
    ]
    split = [sum(s[side] != 0 for s in signs) for side in (0, 1)]
    if not all(split):
        return None
    return float(sum(a * b for a, b in signs) / (split[0] * split[1]) ** 0.5)
