"""The search for a shape: fits that find what made the numbers, and a ranking that follows them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specctl.core.errors import SpecctlError
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.models.llama.llama import LlamaShape
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.stats import expected_tau
from specctl.runtime.target.target import Target
from specctl.train.prune.shapes import (
    Acceptances,
    DraftShape,
    Latency,
    Reached,
    agreement,
    alpha_of,
    constant,
    fit_acceptance,
    fit_latency,
    latency_row,
    least_squares,
    measure_latency,
    measure_reached,
    rank,
    unseen,
)

BASE = LlamaShape(8, 256, 6144, 4, 2, 64, 640, 1e-5, 1e4, tied=True)
GRID = [DraftShape(layers, width) for layers in (1, 2, 4) for width in (128, 192, 256)]
MAKES = torch.tensor([1e-4, 5e-4, 1e-10, 2e-10], dtype=torch.float64)


def seconds(shape: DraftShape) -> float:
    row = torch.tensor(latency_row(shape, BASE, 2048), dtype=torch.float64)
    return float(row @ MAKES)


def latency() -> Latency:
    verify = dict.fromkeys(range(1, 9), 0.004)
    return fit_latency({shape: seconds(shape) for shape in GRID}, verify, BASE, 2048)


def alpha(shape: DraftShape) -> float:
    """Depth adds more to a wide draft than to a narrow one."""
    depth, width = math.log(shape.layers), math.log(shape.width / 128)
    return 1 / (1 + math.exp(1.2 - 0.3 * depth - 0.4 * width - 0.9 * depth * width))


def test_the_fit_finds_the_distribution_that_made_the_times() -> None:
    found = latency()
    assert found.fit.r2 == pytest.approx(1.0, abs=1e-9)
    other = DraftShape(3, 224)
    assert found.step(other) == pytest.approx(seconds(other), rel=1e-6)


def test_r2_says_how_much_is_explained() -> None:
    rows = [[1.0, x] for x in (0.0, 1.0, 2.0, 3.0)]
    assert least_squares(rows, [1.0, 3.0, 5.0, 7.0]).r2 == pytest.approx(1.0)
    assert least_squares(rows, [1.0, -1.0, 1.0, -1.0]).r2 == pytest.approx(0.2)
    with pytest.raises(SpecctlError, match="too few measurements"):
        least_squares([[1.0, 2.0]], [1.0])


def test_a_point_left_out_is_predicted_by_a_fit_of_the_others() -> None:
    rows = [[1.0, x, x * x] for x in (0.0, 1.0, 2.0, 4.0, 5.0)]
    values = [0.5, 2.0, 3.0, 9.0, 7.0]
    whole = least_squares(rows, values)
    for i, row in enumerate(rows):
        others = least_squares(rows[:i] + rows[i + 1 :], values[:i] + values[i + 1 :])
        assert float(whole.left_out_N[i]) == pytest.approx(others.at(row))
    assert whole.left_out_r2 is not None
    assert whole.left_out_r2 < whole.r2


def test_what_the_others_do_not_determine_is_not_predicted_from_them() -> None:
    rows = [[1.0, 0.0], [1.0, 0.0], [1.0, 5.0]]
    fit = least_squares(rows, [1.0, 2.0, 9.0])
    assert fit.left_out_N.isnan().tolist() == [False, False, True]
    assert fit.left_out_r2 is None


def test_a_table_of_acceptances_is_continued_in_depth_and_width() -> None:
    found = fit_acceptance({shape: constant(alpha(shape)) for shape in GRID})
    assert found.fit.r2 == pytest.approx(1.0)
    other = DraftShape(3, 224)
    assert found.reached(other).alpha == pytest.approx(alpha(other))


def test_depth_and_width_without_their_product_explain_less() -> None:
    logits = [math.log(alpha(s) / (1 - alpha(s))) for s in GRID]
    rows = [[1.0, math.log(s.layers), math.log(s.width)] for s in GRID]
    apart = least_squares(rows, logits).left_out_r2
    together = fit_acceptance({s: constant(alpha(s)) for s in GRID}).fit.left_out_r2
    assert apart is not None
    assert together is not None
    assert apart < 0.9 < together


def test_a_healed_shape_is_ranked_by_what_was_measured_of_it() -> None:
    lucky = DraftShape(2, 192)
    known = {shape: constant(alpha(shape)) for shape in GRID}
    known[lucky] = Reached((0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2), 0.1)
    times = latency()
    slow = fit_latency({**times.measured, lucky: 0.5}, times.verify, BASE, 2048)
    found = {c.shape: c for c in rank(GRID, slow, fit_acceptance(known))}[lucky]
    assert found.step_seconds == 0.5
    assert found.length == 1
    assert found.tau == pytest.approx(1.9)
    assert found.alpha_error is not None
    assert found.alpha_error > 0
    assert found.tokens_per_second == pytest.approx(1.9 / 0.504)
    alone = unseen(slow, fit_acceptance(known))[lucky]
    assert alone.alpha == pytest.approx(alpha(lucky))
    assert alone.step_seconds == pytest.approx(seconds(lucky), rel=1e-3)
    assert alone.alpha_error is None


def test_tau_gives_back_the_acceptance_that_made_it() -> None:
    for chance in (0.1, 0.5, 0.9):
        assert alpha_of(expected_tau(chance, 5), 5) == pytest.approx(chance)
        assert constant(chance).tau(3) == pytest.approx(expected_tau(chance, 3))


def test_acceptance_is_measured_with_its_error(make_target: Any) -> None:
    target: Target = make_target()
    prompts = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]
    whole = SmallLm.from_lm(target.lm, target.spec)
    sure = measure_reached(target, whole, prompts, tokens=12, length=3)
    assert sure.share_at == (1.0, 1.0, 1.0)
    assert sure.error == pytest.approx(0.0)
    torch.manual_seed(1)
    shape = DraftShape(1, 16).options(target.lm.module.shape)
    other = measure_reached(target, SmallLm(SmallLmOptions(**shape), target.spec), prompts, 12, 3)
    assert other.tau(3) < 2.0
    assert list(other.share_at) == sorted(other.share_at, reverse=True)
    assert measure_reached(target, whole, prompts[:1], 12, 3).error is None


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
    same = Acceptances(least_squares([[1.0, 0.0, 0.0, 0.0]] * 4, [0.0] * 4), {})
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
    assert set(found.verify) == {0, 1, 3}
    assert all(value > 0 for value in found.verify.values())
    assert found.head_rows == 48


def test_verification_is_measured_once_whatever_the_number_of_shapes(
    make_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def counted(*given: Any, lengths: tuple[int, ...], **named: Any) -> CostTable:
        asked.append(tuple(lengths))
        return measure_costs(*given, lengths=lengths, **named)

    monkeypatch.setattr("specctl.train.prune.shapes.measure_costs", counted)
    target: Target = make_target(num_layers=2)
    base = target.lm.module.shape
    shapes = [DraftShape(layers, width) for layers in (1, 2) for width in (16, 32)]
    measure_latency(target, base, shapes, None, [[3, 1, 4]], rounds=4, lengths=(1, 2, 3))
    assert asked == [(1, 3)] * 4 + [(1, 2, 3)]


def test_rankings_are_compared_by_their_pairs() -> None:
    a, b, c = (DraftShape(layers, 64) for layers in (1, 2, 3))
    rising = {a: 1.0, b: 2.0, c: 3.0}
    assert agreement(rising, {a: 10.0, b: 20.0, c: 30.0}).kendall_tau == 1.0
    assert agreement(rising, {a: 30.0, b: 20.0, c: 10.0}).kendall_tau == -1.0
    assert agreement(rising, {a: 10.0, b: 30.0, c: 20.0}).kendall_tau == pytest.approx(1 / 3)


def test_pairs_that_differ_by_no_more_than_noise_are_ties() -> None:
    a, b, c = (DraftShape(layers, 64) for layers in (1, 2, 3))
    noise = {(a, b): 0.5, (a, c): 0.5, (b, c): 5.0}
    found = agreement({a: 1.0, b: 2.0, c: 3.0}, {a: 10.0, b: 20.0, c: 16.0}, noise)
    assert (found.alike, found.otherwise, found.ties) == (2, 0, 1)
    assert found.kendall_tau == 1.0
    assert agreement({a: 1.0, b: 2.0}, {a: 5.0, b: 5.0}).kendall_tau is None
