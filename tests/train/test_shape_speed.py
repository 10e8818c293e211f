"""benchmarks/shape_speed.py: when two measured shapes differ, and when a benchmark ends."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.prune.shapes import Candidate, DraftShape, agreement

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
A, B = DraftShape(1, 16), DraftShape(2, 16)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("shape_speed")


def test_the_error_of_a_mean_is_the_known_one(speed: ModuleType) -> None:
    values = [3.0, 5.0, 4.0, 8.0]
    without = [(sum(values) - x) / 3 for x in values]
    spread = sum((x - 5.0) ** 2 for x in values) / 3
    assert speed.jackknife(without) == pytest.approx((spread / 4) ** 0.5)


def test_prompts_that_are_slow_for_both_shapes_do_not_hide_which_is_faster(
    speed: ModuleType,
) -> None:
    seconds = (0.1, 0.9, 0.2, 0.6)
    slow = tuple(1.05 * s for s in seconds)
    speeds = {A: speed.Speed((48,) * 4, seconds), B: speed.Speed((48,) * 4, slow)}
    gap = speeds[A].rate - speeds[B].rate
    assert gap < speeds[A].error
    assert gap > speed.noise(speeds)[A, B]


def test_shapes_that_win_on_different_prompts_are_a_tie(speed: ModuleType) -> None:
    speeds = {
        A: speed.Speed((48,) * 4, (0.2, 0.4, 0.2, 0.4)),
        B: speed.Speed((48,) * 4, (0.4, 0.2, 0.3, 0.25)),
    }
    rates = {shape: found.rate for shape, found in speeds.items()}
    assert rates[A] != rates[B]
    assert agreement({A: 1.0, B: 2.0}, rates, speed.noise(speeds)).ties == 1


def test_repeats_end_where_another_would_leave_the_budget(speed: ModuleType) -> None:
    assert list(speed.within(3, 0.0, SilentReporter())) == [0]
    assert list(speed.within(3, 60.0, SilentReporter())) == [0, 1, 2]


def test_every_shape_is_measured_on_every_prompt(speed: ModuleType, make_target: Any) -> None:
    target: Target = make_target()
    torch.manual_seed(0)
    base = target.lm.module.shape
    drafts = {s: SmallLm(SmallLmOptions(**s.options(base)), target.spec) for s in (A, B)}
    best = [Candidate(s, 1, 1e-3, 0.5, None, 2, 1.5, 100.0) for s in (A, B)]
    given = ([[3, 1, 4], [1, 5, 9], [2, 6]], speed.Effort(6, 2, 1.0), SilentReporter())
    found = speed.measured(target, drafts, best, *given)
    assert set(found) == {A, B}
    assert all(each.tokens_P == (6, 6, 6) for each in found.values())
    assert all(each.rate > 0 and each.error >= 0 for each in found.values())
