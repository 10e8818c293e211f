"""The search for a shape: fits that find what made the numbers, and a ranking that follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.drafters.parts.llama import LlamaShape
from specctl.drafters.parts.vocab import VocabMap
from specctl.drafters.small_lm import SmallLm, SmallLmOptions
from specctl.recipes.errors import SpecctlError
from specctl.runtime.stats import expected_tau
from specctl.runtime.target import Target
from specctl.train.prune.shapes import (
    Acceptances,
    DraftShape,
    Fit,
    Latency,
    alpha_of,
    fit_acceptance,
    kendall_tau,
    latency_row,
    least_squares,
    measure_latency,
    rank,
)

BASE = LlamaShape(8, 256, 6144, 4, 2, 64, 640, 1e-5, 1e4, tied=True)
GRID = [DraftShape(layers, width) for layers in (1, 2, 4) for width in (128, 192, 256)]
MAKES = torch.tensor([1e-4, 5e-4, 1e-10, 2e-10], dtype=torch.float64)


def seconds(shape: DraftShape) -> float:
    row = torch.tensor(latency_row(shape, BASE, 2048), dtype=torch.float64)
    return float(row @ MAKES)


def latency() -> Latency:
    measured = {shape: seconds(shape) for shape in GRID}
    rows = [latency_row(shape, BASE, 2048) for shape in GRID]
    fit = least_squares(rows, list(measured.values()))
    return Latency(fit, measured, dict.fromkeys(range(1, 9), 0.004), BASE, 2048)


def test_the_fit_finds_the_law_that_made_the_times() -> None:
    found = latency()
    assert found.fit.r2 == pytest.approx(1.0, abs=1e-9)
    unseen = DraftShape(3, 224)
    assert found.step(unseen) == pytest.approx(seconds(unseen), rel=1e-6)


def test_r2_says_how_much_is_explained() -> None:
    rows = [[1.0, x] for x in (0.0, 1.0, 2.0, 3.0)]
    assert least_squares(rows, [1.0, 3.0, 5.0, 7.0]).r2 == pytest.approx(1.0)
    assert least_squares(rows, [1.0, -1.0, 1.0, -1.0]).r2 == pytest.approx(0.2)
    with pytest.raises(SpecctlError, match="too few measurements"):
        least_squares([[1.0, 2.0]], [1.0])


def test_a_table_of_acceptances_is_continued_in_depth_and_width() -> None:
    true = {s: 1 / (1 + 2.0 * s.layers**-0.5 * (s.width / 128) ** -1) for s in GRID}
    found = fit_acceptance(true)
    assert found.fit.r2 == pytest.approx(1.0)
    assert found.alpha(DraftShape(3, 224)) == pytest.approx(
        1 / (1 + 2 * 3**-0.5 * (224 / 128) ** -1)
    )


def test_tau_gives_back_the_acceptance_that_made_it() -> None:
    for alpha in (0.1, 0.5, 0.9):
        assert alpha_of(expected_tau(alpha, 5), 5) == pytest.approx(alpha)


def test_shapes_keep_the_targets_proportions(make_target: Any) -> None:
    options = DraftShape(2, 128).options(BASE)
    assert (options["heads"], options["kv_heads"], options["intermediate"]) == (2, 1, 320)
    shape = DraftShape(2, 16)
    target: Target = make_target()
    base = target.lm.module.shape
    drafter = SmallLm(SmallLmOptions(**shape.options(base)), target.spec)
    matrices = {n: t for n, t in drafter.tensors().items() if "proj" in n}
    assert shape.body_parameters(base) == sum(t.numel() for t in matrices.values())


def test_where_depth_costs_a_wide_shallow_draft_wins_at_equal_size() -> None:
    wide, deep = DraftShape(1, 256), DraftShape(4, 128)
    assert wide.body_parameters(BASE) == deep.body_parameters(BASE)
    same = Acceptances(Fit(torch.zeros(3, dtype=torch.float64), 1.0), {})
    ranked = rank([deep, wide], latency(), same)
    assert [c.shape for c in ranked] == [wide, deep]
    best = ranked[0]
    step = seconds(wide)
    rates = {k: expected_tau(0.5, k) / (k * step + 4e-3) for k in range(1, 9)}
    assert best.tokens_per_second == pytest.approx(max(rates.values()), rel=1e-6)
    assert rates[best.length] == pytest.approx(best.tokens_per_second, rel=1e-6)
    assert rank([deep, wide], latency(), same, max_parameters=1) == []


def test_latency_is_measured_in_the_engine(make_target: Any) -> None:
    target: Target = make_target(num_layers=2)
    base = target.lm.module.shape
    shapes = [DraftShape(layers, width) for layers in (1, 3) for width in (16, 32)]
    vocab = VocabMap(torch.arange(48), target.spec.vocab_size)
    found = measure_latency(target, base, shapes, vocab, [[3, 1, 4]], rounds=8, lengths=(1, 3))
    assert set(found.measured) == set(shapes)
    assert set(found.verify) == {1, 3}
    assert all(value > 0 for value in found.verify.values())
    assert found.head_rows == 48


def test_rankings_are_compared_by_their_pairs() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1.0
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1.0
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
