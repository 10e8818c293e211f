"""What trimming a draft vocabulary did: figures, the coverage curve, and how to show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specctl.recipes.errors import SpecctlError
from specctl.train.coverage import HeadCost, Predicted

BAR = 40
MBSU_FORMULA = "MBSU = tau / (1 + g c), g draft calls per round, c = drafter bytes / target bytes"
SPEEDUP_FORMULA = "S(k) = tau(alpha0 C(k)) / (c_verify + g (c_body + c_head k / V))"


@dataclass(frozen=True, slots=True)
class Measured:
    """A drafter on held-out prompts. `alpha` = accepted / tested drafts."""

    tau: float
    alpha: float
    tokens_per_second: float
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A size that was tried: what was promised, what was measured. `speedup` takes the measured tau
    and the fitted cost, which is steadier than one timed run."""

    predicted: Predicted
    measured: Measured
    speedup: float

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.predicted.size,
            "coverage": round(self.predicted.coverage, 5),
            "predicted": {
                "tau": round(self.predicted.tau, 4),
                "speedup": round(self.predicted.speedup, 4),
            },
            "measured": _rounded(self.measured) | {"speedup": round(self.speedup, 4)},
        }


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Coverage of the `size` best ids, over all and in the worst domain."""

    size: int
    coverage: float
    worst: float


@dataclass(frozen=True, slots=True)
class TrimReport:
    """Everything about one trimming. `coverage` is on documents that were not ranked, `unseen` kept
    ids were never counted, `byte_ratio` is c of MBSU."""

    family: str
    source: str
    size: int
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
    length: int
    calls: int
    byte_ratio_before: float
    byte_ratio: float
    mbsu_before: float
    mbsu: float
    before: Measured
    after: Measured
    cost: HeadCost
    trials: tuple[Trial, ...]
    min_coverage: float | None

    @property
    def pays(self) -> bool:
        """Whether a smaller vocabulary than before was chosen."""
        return self.size < self.size_before

    def to_json(self) -> dict[str, Any]:
        plain = (
            "family", "source", "size", "size_before", "target_size", "digest", "tokens_ranked",
            "tokens_heldout", "special", "unseen", "length", "calls", "min_coverage",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in plain},
            "coverage": round(self.coverage, 5),
            "coverage_by_domain": {k: round(v, 5) for k, v in self.coverage_by_domain.items()},
            "curve": [asdict(point) for point in self.curve],
            "byte_ratio": {"before": self.byte_ratio_before, "after": self.byte_ratio},
            "mbsu": {"before": self.mbsu_before, "after": self.mbsu, "formula": MBSU_FORMULA},
            "before": _rounded(self.before),
            "after": _rounded(self.after),
            "cost": self.cost.to_json() | {"formula": SPEEDUP_FORMULA},
            "trials": [trial.to_json() for trial in self.trials],
        }

    def lines(self) -> list[str]:
        """The report in a few lines of text."""
        verdict = (
            f"kept {self.size:,} of {self.size_before:,} ids"
            if self.pays
            else f"all {self.size_before:,} ids kept: on this device no smaller head pays"
        )
        domains = ", ".join(f"{name} {value:.2%}" for name, value in self._worst_first())
        return [
            f"{verdict} ({self.special} special, {self.unseen:,} never seen)",
            f"coverage {self.coverage:.2%} of {self.tokens_heldout:,} tokens that were not ranked "
            f"(long tail lost: {1 - self.coverage:.2%}); by domain: {domains}",
            f"tau {self.before.tau:.3f} -> {self.after.tau:.3f}, "
            f"{self.before.tokens_per_second:,.0f} -> {self.after.tokens_per_second:,.0f} tok/s",
            f"MBSU {self.mbsu_before:.3f} -> {self.mbsu:.3f} "
            f"(c {self.byte_ratio_before:.4f} -> {self.byte_ratio:.4f}, g {self.calls}; "
            f"{MBSU_FORMULA})",
            *self.table(),
            *self._warnings(),
        ]

    def _warnings(self) -> list[str]:
        best = max(trial.speedup for trial in self.trials)
        if best >= 1.0:
            return []
        return [
            f"even so, decoding without this drafter is faster here (S {best:.2f}): "
            "train it longer, or draft fewer tokens"
        ]

    def table(self) -> list[str]:
        """Predicted against measured, best size first."""
        lines = ["  kept   coverage   tau pred/meas    S pred/meas     tok/s"]
        for trial in self.trials:
            p, m = trial.predicted, trial.measured
            lines.append(
                f"{p.size:>6,}   {p.coverage:>7.2%}   {p.tau:>6.3f} / {m.tau:<6.3f}  "
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
            lines.append(f"{point.size:>8,} {point.coverage:>7.2%} |{bar:<{BAR}}|{chosen}")
        return "\n".join(lines)

    def save_png(self, path: Path) -> Path:
        """The coverage curve as a picture; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SpecctlError(
                "drawing the coverage curve needs matplotlib", do="pip install 'specctl[plots]'"
            ) from error
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        sizes = [point.size for point in self.curve]
        axes.plot(sizes, [100 * p.coverage for p in self.curve], marker="o", label="all domains")
        axes.plot(sizes, [100 * p.worst for p in self.curve], ls="--", label="worst domain")
        axes.axvline(self.size, color="0.6", lw=1, label=f"chosen: {self.size:,}")
        axes.set(xscale="log", xlabel="ids kept", ylabel="coverage, % of held-out tokens")
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        return path


def _rounded(measured: Measured) -> dict[str, Any]:
    return {
        "tau": round(measured.tau, 4),
        "alpha": round(measured.alpha, 4),
        "tokens_per_second": round(measured.tokens_per_second, 2),
        "tokens": measured.tokens,
    }
