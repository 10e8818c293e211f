"""The picture of a comparison: what stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.train.comparison_plot import save_comparison


def test_bars_and_lines_carry_the_figures(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        path = save_comparison(
            ["plain", "eagle3"],
            {"greedy": [1.0, 2.37], "temperature 0.8": [1.0, None]},
            {"eagle3": [0.8, 0.6]},
            "Drafters of tiny",
            tmp_path / "new" / "bench.svg",
        )
    assert path is not None
    text = path.read_text()
    for part in ("2.37", "temperature 0.8", "Acceptance by position", "Drafters of tiny", "eagle3"):
        assert part in text
    assert save_comparison([], {}, {}, "nothing", tmp_path / "none.png") is None
