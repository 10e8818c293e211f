"""A picture of a comparison: speed-up over plain decoding, acceptance by position, and what a round
brings against what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

MARKERS = "osD^vP*X<>"
TALL = 6.0  # inches
MOST_LINES = 10  # of acceptance by position; more cannot be told apart
SPEEDUPS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # lines
CUT_OUT = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # of the line behind a label
LONGEST = 32  # characters of a name that leave room for the panels


def save_comparison(
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    positions: Mapping[str, Sequence[float]],
    title: str,
    path: Path,
    rounds: Mapping[str, tuple[float, float]] | None = None,
) -> Path | None:
    """Bars of speed-up for every name, one a series (a sampling, a target), beside them the share
    of drafted tokens accepted at each position and the tokens of a round over its cost. None
    without matplotlib or anything to draw.

    `series[label][i]` belongs to `names[i]`; None leaves the bar out. `positions[name][k]` is the
    chance, in 0..1, that position k + 1 is accepted given that it was reached. `rounds[name]`: what
    a round costs, in plain tokens, and the tokens that it brings. Of long names, such as folders,
    the end is shown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not names or not series:
        return None
    height = max(3.6, 1.6 + 0.2 * len(names) * (0.6 + len(series)))
    beside: list[Callable[[Any], None]] = []
    if positions:
        beside.append(partial(_lines, positions=positions))
    if rounds:
        beside.append(partial(_rounds, rounds=rounds))
    figure = Figure(figsize=(7 + 4 * len(beside), height), layout="constrained")
    figure.suptitle(title, fontsize=13)
    left, *others = figure.subplots(
        1, 1 + len(beside), width_ratios=(3, *[2] * len(beside)), squeeze=False
    )[0]
    for axes, draw in zip(others, beside, strict=True):
        draw(axes)
        if height > TALL:  # beside many bars they stay as high as they are wide, on top
            axes.set_box_aspect(1)
            axes.set_anchor("N")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=9)
    _bars(left, [_shown(name) for name in names], series)
    if len(series) > 1:
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    thick, columns = 0.8 / len(series), list(series.values())
    for number, (label, values) in enumerate(series.items()):
        drawn = [(i, value) for i, value in enumerate(values) if value is not None]
        sizes = [size for _, size in drawn]
        places = [i + thick * _offset(columns, number, i) for i, _ in drawn]
        bars = axes.barh(places, sizes, thick, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=9, bbox=CUT_OUT, zorder=3)
    axes.axvline(1.0, color="0.4", linestyle="--", linewidth=1, zorder=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top, and room where a bar is left out
    axes.margins(x=0.12)
    axes.set(xlabel="speed-up (times plain decoding; dashed: plain)", title="Speed-up")


def _offset(columns: Sequence[Sequence[float | None]], number: int, i: int) -> float:
    """Where the bar of a series stands around name i, in bars: those left out take no room."""
    present = [k for k, values in enumerate(columns) if values[i] is not None]
    return present.index(number) - (len(present) - 1) / 2


def _lines(axes: Any, positions: Mapping[str, Sequence[float]]) -> None:
    shown, hidden = list(positions.items())[:MOST_LINES], len(positions) > MOST_LINES
    for (name, shares), marker in zip(shown, MARKERS, strict=False):
        places = range(1, len(shares) + 1)
        axes.plot(
            places, [100 * x for x in shares], marker=marker, label=_shown(name), linewidth=1.5
        )
    longest = max((len(shares) for _, shares in shown), default=1)
    axes.set_xticks(range(1, longest + 1, max(1, longest // 8)))
    axes.set_ylim(
        0, min(102, 12 + max((100 * x for _, shares in shown for x in shares), default=0))
    )
    axes.grid(axis="y", color="0.9")
    axes.set(
        xlabel="position in the draft (tokens)",
        ylabel="accepted (% where reached)",
        title="Acceptance by position" + (f" (first {MOST_LINES})" if hidden else ""),
    )
    axes.legend(fontsize=9)


def _rounds(axes: Any, rounds: Mapping[str, tuple[float, float]]) -> None:
    """Tokens of a round over its cost: a speed-up is a line through the origin, the one of plain
    decoding dashed; left of a cost of one plain token nothing can be, and a hollow mark at it is
    what a drafter would bring if its rounds cost no more."""
    shown = list(rounds.items())[:MOST_LINES]
    wide = 1.25 * max(1.6, *(cost for _, (cost, _) in shown))
    high = 1.15 * max(2.0, *(tau for _, (_, tau) in shown))
    for speedup in SPEEDUPS:
        end = min(wide, high / speedup)
        style = "--" if speedup == 1 else "-"
        axes.plot((0, end), (0, end * speedup), style, color="0.8", linewidth=1, zorder=1)
        place = (0.92 * end, 0.92 * end * speedup)
        axes.text(
            *place, f"{speedup:g}x", color="0.4", fontsize=8, ha="center", va="center", bbox=CUT_OUT
        )
    axes.axvspan(0, 1, color="0.95", zorder=0)
    for (name, (cost, tau)), marker in zip(shown, MARKERS, strict=False):
        (mark,) = axes.plot(cost, tau, marker, label=_shown(name), zorder=3)
        faint = {"color": mark.get_color(), "zorder": 2}
        axes.plot((1, cost), (tau, tau), ":", linewidth=1, **faint)
        axes.plot(1, tau, marker, markerfacecolor="white", **faint)
    axes.set(
        xlim=(0, wide),
        ylim=(0, high),
        xlabel="cost of a round (plain tokens; hollow: the limit)",
        ylabel="tokens of a round (tau)",
        title="What a round brings and costs"
        + (f" (first {MOST_LINES})" if len(rounds) > MOST_LINES else ""),
    )
    axes.legend(fontsize=9)


def _shown(name: str) -> str:
    """The name, or of a long one its last folders that fit, at least its last characters."""
    if len(name) <= LONGEST:
        return name
    end = name[-(LONGEST - 1) :]
    slash = end.find("/")
    return "\u2026" + (end[slash:] if 0 <= slash < LONGEST // 2 else end)
