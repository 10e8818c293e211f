"""A drafter that knows its rows and nothing else is said to."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.train.metrics.overfitting import overfitting


def log(top1: float, alpha: float) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"step": step, "top1": 0.1} for step in range(20)]
    lines += [{"step": 20 + step, "top1": top1} for step in range(5)]
    return [*lines, {"step": 25, "tau": 2.0, "measured_alpha": [alpha, 0.3]}]


def test_rows_known_by_heart_are_said_with_both_shares() -> None:
    text = overfitting(log(0.91, 0.48))
    assert text is not None
    assert "finds 91% of the next tokens in its training rows and 48%" in text


@pytest.mark.parametrize(
    "lines", [log(0.6, 0.5), log(0.4, 0.5), [], [{"top1": 0.9}], [{"measured_alpha": []}]]
)
def test_nothing_is_said_where_both_are_alike_or_unknown(lines: list[dict[str, Any]]) -> None:
    assert overfitting(lines) is None
