"""What trimming a draft vocabulary did: figures, curves by size, and how to show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.installed import pip_install
from specctl.train.vocab.domains import DomainRow, Side
from specctl.train.vocab.measure import MeasuredDrafter
from specctl.train.vocab.predict import Predicted
from specctl.train.vocab.search import TrimChoice

BAR = 40
MBSU_FORMULA = "MBSU = tau / (1 + g c), g draft calls per round, c = drafter bytes / target bytes"
SPEEDUP_FORMULA = "S(k) = tau(k) / (c_verify + g (c_body + c_head k / V))"


@dataclass(frozen=True, slots=True)
class TrimTrial:
    """A choice that was tried: what was promised, what was measured. `speedup` takes the measured
    tau and the fitted cost, which is steadier than one timed run."""

    predicted: Predicted
    measured: MeasuredDrafter
    speedup: float
    choice: TrimChoice

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.predicted.size,
            "length": self.choice.length,
            "weights": {name: round(w, 3) for name, w in self.choice.weights.items()},
            "coverage": round(self.predicted.coverage, 5),
            "predicted": {
                "alpha": round(self.predicted.alpha, 4),
                "tau": round(self.predicted.tau, 4),
                "speedup": round(self.predicted.speedup, 4),
            },
            "measured": _rounded(self.measured) | {"speedup": round(self.speedup, 4)},
        }


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
            "mbsu": {
                "before": before.moved.mbsu(before.measured.tau),
                "after": after.moved.mbsu(after.measured.tau),
                "formula": MBSU_FORMULA,
            },
            "before": _rounded(before.measured),
            "after": _rounded(after.measured),
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
        mbsu = [side.moved.mbsu(side.measured.tau) for side in (self.before, self.after)]
        return [
            f"{verdict} ({self.special} special, {self.unseen:,} never seen), "
            f"selected by {self.selector}" + self._choice_note(),
            f"coverage {self.coverage:.2%} of {self.tokens_heldout:,} tokens that were not ranked "
            f"(long tail lost: {1 - self.coverage:.2%}); by domain: {domains}",
            f"tau {before.tau:.3f} -> {after.tau:.3f}, alpha {before.alpha:.3f} -> "
            f"{after.alpha:.3f}, {before.tokens_per_second:,.0f} -> "
            f"{after.tokens_per_second:,.0f} tok/s",
            f"MBSU {mbsu[0]:.3f} -> {mbsu[1]:.3f} (c {ratios[0]:.4f} -> {ratios[1]:.4f}, "
            f"g {self.after.moved.calls}; {MBSU_FORMULA})",
            *self.domain_table(),
            f"tried, predicted from {self.predictor}:",
            *self.table(),
            *self._warnings(),
        ]

    def _choice_note(self) -> str:
        if self.search != "tpe":
            return ""
        weights = ", ".join(f"{name} {w:.2f}" for name, w in self.choice.weights.items())
        return f", drafting {self.choice.length}" + (f", weights {weights}" if weights else "")

    def _warnings(self) -> list[str]:
        found = []
        losers = [row for row in self.domains if row.gain < 1.0]
        if losers:
            row = min(losers, key=lambda row: row.gain)
            found.append(
                f"{row.domain} is slower than before ({row.gain:.3f}x): keep more ids, or count "
                "more of that text"
            )
        if max(trial.speedup for trial in self.trials) < 1.0:
            best = max(trial.speedup for trial in self.trials)
            found.append(
                f"even so, decoding without this drafter is faster here (S {best:.2f}): "
                "train it longer, or draft fewer tokens"
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
        """Coverage above, predicted tau and speed-up below, as a picture; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SpecctlError(
                "drawing the coverage curve needs matplotlib", do=pip_install("plots")
            ) from error
        figure = Figure(figsize=(6.4, 6.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        sizes = [point.size for point in self.curve]
        upper.plot(sizes, [100 * p.coverage for p in self.curve], marker="o", label="all domains")
        upper.plot(sizes, [100 * p.worst for p in self.curve], ls="--", label="worst domain")
        upper.set(ylabel="coverage, % of held-out tokens")
        lower.plot(sizes, [p.speedup for p in self.curve], marker="o", label="speed-up, predicted")
        lower.plot(sizes, [p.tau for p in self.curve], ls="--", label="tau, predicted")
        tried = [(t.predicted.size, t.speedup) for t in self.trials]
        lower.scatter(
            *zip(*tried, strict=True), color="k", zorder=3, label="speed-up, measured tau"
        )
        lower.set(xscale="log", xlabel="ids kept", ylabel="tau; speed-up over plain decoding")
        for axes in (upper, lower):
            axes.axvline(self.size, color="0.6", lw=1, label=f"chosen: {self.size:,}")
            axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        return path


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


def _rounded(measured: MeasuredDrafter) -> dict[str, Any]:
    return {
        "tau": round(measured.tau, 4),
        "alpha": round(measured.alpha, 4),
        "tokens_per_second": round(measured.tokens_per_second, 2),
        "tokens": measured.tokens,
    }
