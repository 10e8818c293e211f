"""The tables and the picture of `specctl bench-families`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specctl.cli.app.console import Console

LEGEND = (
    "size: trained and frozen parameters of its own; sec: training; alpha: chance at the first "
    "three positions; chain, tree: tau; of the faster of the two: draft (share of the time), "
    "tok/s, plain (speed-up over plain decoding), hf (over transformers' assisted generation)"
)


def show_tables(
    console: Console, rows: Sequence[dict[str, Any]], out: Path, plot: Path | None
) -> Path | None:
    """A table for every target and setting, and OUT/families.png with all their speed-ups, ordered
    as the last table is, beside the acceptance by position; once more as `plot`."""
    from specctl.train.metrics.comparison_plot import save_comparison

    measured = [row for row in rows if row["error"] is None]
    settings = dict.fromkeys(f"{row['target']}, {row['setting']}" for row in measured)
    speeds: dict[str, dict[str, float]] = {}
    for title in settings:
        mine = [row for row in measured if f"{row['target']}, {row['setting']}" == title]
        columns = ["family", "size", "sec", "alpha", "chain", "tree", "draft", "tok/s", "plain"]
        has_assisted = any(row["speedup_over_assisted"] is not None for row in mine)
        ordered = sorted(mine, key=lambda row: -row["speedup"])
        console.table(
            [*columns, "hf"] if has_assisted else columns,
            [_cells(row, has_assisted) for row in ordered],
            title=title,
        )
        speeds[title] = {row["family"]: row["speedup"] for row in ordered}
    names = list(dict.fromkeys(name for found in reversed(speeds.values()) for name in found))
    series = {title: [found.get(name, 0.0) for name in names] for title, found in speeds.items()}
    console.prose(LEGEND)
    positions = {
        row["family"]: row["alpha"]
        for row in sorted(measured, key=lambda row: -row["speedup"])
        if row["setting"] == measured[0]["setting"] and row["target"] == measured[0]["target"]
    } if measured else {}  # fmt: skip
    title = "Drafter families, trained alike"
    if len(series) == 1:  # no legend says it
        title += f": {next(iter(series))}"
    if plot is not None:
        save_comparison(names, series, positions, title, plot)
    return save_comparison(names, series, positions, title, out / "families.png")


def _cells(row: dict[str, Any], has_assisted: bool) -> list[object]:
    over = row["speedup_over_assisted"]
    cells = [
        row["family"],
        short(row["parameters"]),
        f"{row['train_seconds']:.0f}",
        " ".join(f"{x:.2f}".removeprefix("0") for x in row["alpha"][:3]),
        row["tau_chain"],
        row["tau_tree"],
        None if row["draft_share"] is None else f"{row['draft_share']:.0%}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f}x",
    ]
    return [*cells, None if over is None else f"{over:.2f}x"] if has_assisted else cells


def short(count: int) -> str:
    """117,600 -> "118k"."""
    for size, unit in ((1e9, "b"), (1e6, "m"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.{1 if count < 10 * size else 0}f}{unit}"
    return str(count)
