"""Pictures of a run and of a comparison, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from specctl.train.metrics import read_log


def save_learning_curve(log: Path, path: Path) -> Path | None:
    """Loss, simulated and measured tau over the steps; None without matplotlib or without lines."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = read_log(log) if log.exists() else []
    series = {
        name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for name in ("loss", "simulated_tau", "tau")
    }
    if not series["loss"]:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.add_subplot(xlabel="step", ylabel="loss")
    left.plot(*zip(*series["loss"], strict=True), color="tab:blue", label="loss")
    right = left.twinx()
    right.set_ylabel("tau (tokens per target forward)")
    for name, style in (("simulated_tau", "--"), ("tau", "o-")):
        if series[name]:
            label = name.replace("_", " ") if name != "tau" else "measured tau"
            right.plot(*zip(*series[name], strict=True), style, color="tab:orange", label=label)
    handles = [*left.get_lines(), *right.get_lines()]
    left.legend(handles, [str(h.get_label()) for h in handles], loc="center right")
    figure.savefig(path, dpi=120)
    return path


def save_bars(
    names: Sequence[str], series: Mapping[str, Sequence[float]], axis: str, path: Path
) -> Path | None:
    """A group of horizontal bars per name, one bar of it per series, with a line at 1; None
    without matplotlib or without names."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not names or not series:
        return None
    thick = 0.8 / len(series)
    figure = Figure(figsize=(7, 1.2 + 0.25 * len(names) * (1 + len(series))), layout="constrained")
    axes = figure.add_subplot(xlabel=axis)
    for number, (label, values) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * thick for i in range(len(names))]
        bars = axes.barh(places, values, thick, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.axvline(1.0, color="gray", linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return path
