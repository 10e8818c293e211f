"""The picture of a comparison: what stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.train.metrics.comparison_plot import _offset, save_comparison


def test_bars_and_lines_carry_the_figures(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        path = save_comparison(
            ["plain", "eagle3"],
            {"greedy": [1.0, 2.37], "temperature 0.8": [1.0, None]},
            {"eagle3": [0.8, 0.6]},
            "Drafters of tiny",
            tmp_path / "new" / "bench.svg",
            {"eagle3": (1.3, 2.1)},
        )
    assert path is not None
    text = path.read_text()
    for part in (
        "What a round brings and costs",
        "1.5x",
        "hollow: the limit",
        "2.37",
        "temperature 0.8",
        "Acceptance by position",
        "Drafters of tiny",
        "eagle3",
    ):
        assert part in text
    assert save_comparison([], {}, {}, "nothing", tmp_path / "none.png") is None


def test_a_bar_that_is_left_out_leaves_no_gap() -> None:
    greedy, sampled = (1.0, 2.0), (1.0, None)
    offsets = [_offset((greedy, sampled), number, 0) for number in (0, 1)]
    assert offsets == [-0.5, 0.5]
    assert _offset((greedy, sampled), 0, 1) == 0, "alone, it stands at its name"


def test_of_long_names_the_end_is_shown(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    folder = "/srv/of/many/people/and/projects/runs/eagle3-of-today/package"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        path = save_comparison(
            [folder, "x" * 80], {"greedy": [1.5, 1.0]}, {folder: [0.8]}, "", tmp_path / "bench.svg"
        )
    assert path is not None
    text = path.read_text()
    assert text.count("\u2026/runs/eagle3-of-today/package") == 2, (
        "below the bars and in the legend"
    )
    assert "\u2026" + "x" * 31 in text
    assert "/srv" not in text
    assert "x" * 32 not in text
