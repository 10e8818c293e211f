"""Pictures of a run, where matplotlib is installed."""

from __future__ import annotations

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
