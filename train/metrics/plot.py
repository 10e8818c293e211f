"""The picture of a run, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from specctl.train.metrics.metrics import read_log


def save_learning_curve(log: Path, path: Path) -> Path | None:
    """Loss over the steps, and below it tau, simulated on the training rows and measured on
    held-out prompts and a suite; None without matplotlib or without lines."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = read_log(log) if log.exists() else []
    series = {
        name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for name in ("loss", "simulated_tau", "tau", "suite_tau")
    }
    if not series["loss"]:
        return None
    suite = next((line["suite"] for line in lines if line.get("suite")), "")
    has_tau = bool(series["simulated_tau"] or series["tau"])
    figure = Figure(figsize=(7, 6 if has_tau else 3.4), layout="constrained")
    figure.suptitle(f"Training of {path.parent.name}", fontsize=13)
    panels = figure.subplots(1 + has_tau, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(*zip(*series["loss"], strict=True))
    panels[0].set(ylabel="training loss")
    if has_tau:
        for name, style, label in (
            ("simulated_tau", "--", "simulated on training rows"),
            ("tau", "o-", "measured on held-out prompts"),
            ("suite_tau", "s-", f"measured on {suite}"),
        ):
            if series[name]:
                panels[1].plot(*zip(*series[name], strict=True), style, label=label)
        panels[1].set(ylabel="tau (tokens per target forward)")
        panels[1].legend()
    for axes in panels:
        axes.grid(axis="y", color="0.9")
    panels[-1].set(xlabel="step")
    figure.savefig(path, dpi=150)
    return path
