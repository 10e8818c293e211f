"""Losses against naive formulas, with masks, trimming and chunks. N rows, V target, K draft ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.drafters.parts.align import Aim
from specctl.drafters.parts.losses import (
    KINDS,
    Judge,
    LossOptions,
    acceptance,
    check_kind,
    head_loss,
    laws,
    weighted_sum,
)
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import RecipeError

V, D, N = 11, 6, 9
KEPT = (0, 2, 3, 5, 8, 9)


def naive(kind: str, p: Tensor, q: Tensor, label: int) -> Tensor:
    """One row from plain probabilities."""
    alpha = torch.minimum(p, q).sum()
    kl = (p * (p / q).log()).sum()
    m = (p + q) / 2
    by_kind = {
        "ce": -q[label].log(),
        "kl": kl,
        "rkl": (q * (q / p).log()).sum(),
        "jsd": ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2,
        "tv": (p - q).abs().sum() / 2,
        "lk_alpha": -alpha.log(),
        "lk_hybrid": (-3 * alpha).exp() * kl + (1 - (-3 * alpha).exp()) * (p - q).abs().sum() / 2,
    }
    return by_kind[kind]


def problem(teacher: bool = True) -> tuple[Tensor, Any, Aim]:
    torch.manual_seed(0)
    state = torch.randn(N + 4, D, dtype=torch.float64)
    head = torch.nn.Linear(D, V, bias=False, dtype=torch.float64)
    rows = torch.randperm(N + 4)[:N]
    logits = torch.randn(N + 4, V, dtype=torch.float64) * 2 if teacher else None
    return state, head, Aim(rows, torch.randint(0, V, (N,)), (rows + 1) % (N + 4), logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_equals_its_formula_row_by_row(kind: str, temperature: float) -> None:
    state, head, aim = problem()
    out = head_loss(state, head, aim, None, LossOptions(kind, temperature))
    assert aim.teacher_RV is not None
    expected = 0.0
    for row, label, judge in zip(aim.row_N, aim.label_N, aim.judge_N, strict=True):
        scale = 1.0 if kind == "ce" else temperature
        q = (head(state[row]) / scale).softmax(-1)
        p = (aim.teacher_RV[judge] / scale).softmax(-1)
        expected += float(naive(kind, p, q, int(label)).detach())
    assert float(out.sum.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(out.count) == N


@pytest.mark.parametrize("kind", KINDS)
def test_trimmed_loss_restricts_the_law_and_skips_cut_rows(kind: str) -> None:
    state, head, aim = problem()
    vocab = VocabMap(torch.tensor(KEPT), V)
    out = head_loss(state, lambda x: head(x)[:, list(KEPT)], aim, vocab, LossOptions(kind))
    assert aim.teacher_RV is not None
    expected, count = 0.0, 0
    for row, label, judge in zip(aim.row_N, aim.label_N, aim.judge_N, strict=True):
        p = aim.teacher_RV[judge].softmax(-1)
        q = head(state[row])[list(KEPT)].softmax(-1)
        wanted = int(label) if kind == "ce" else int(p.argmax())
        if kind in ("tv", "lk_alpha"):
            alpha = torch.minimum(p[list(KEPT)], q).sum()
            expected += float(1 - alpha if kind == "tv" else -alpha.log())
            count += 1
        elif wanted in KEPT:
            kept = p[list(KEPT)] / p[list(KEPT)].sum()
            if kind == "lk_hybrid":  # acceptance is always that of the full law
                alpha = torch.minimum(p[list(KEPT)], q).sum()
                weight = (-3 * alpha).exp()
                expected += float(weight * naive("kl", kept, q, 0) + (1 - weight) * (1 - alpha))
            else:
                at = KEPT.index(wanted)
                expected += float(naive(kind, kept, q, at))
            count += 1
    assert float(out.sum) == pytest.approx(expected, rel=1e-5)
    assert float(out.count) == count


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_neither_loss_nor_gradient(kind: str) -> None:
    grads = []
    for chunk in (None, 2):
        state, head, aim = problem()
        state.requires_grad_()
        out = head_loss(state, head, aim, None, LossOptions(kind, chunk=chunk))
        out.sum.backward()
        grads.append((out.sum.detach(), state.grad, head.weight.grad))
    for whole, sliced in zip(*grads, strict=True):
        torch.testing.assert_close(whole, sliced, rtol=1e-5, atol=1e-7)


def test_gradient_of_minus_log_alpha_is_that_of_tv_over_alpha() -> None:
    state, head, aim = problem()
    one = Aim(aim.row_N[:1], aim.label_N[:1], aim.judge_N[:1], aim.teacher_RV)
    state.requires_grad_()
    (by_lk,) = torch.autograd.grad(
        head_loss(state, head, one, None, LossOptions("lk_alpha")).sum, state
    )
    (by_tv,) = torch.autograd.grad(head_loss(state, head, one, None, LossOptions("tv")).sum, state)
    assert one.teacher_RV is not None
    judge = Judge.of(one.teacher_RV, one.judge_N, LossOptions())
    of = laws(head(state[one.row_N]), judge, one.judge_N, None)
    torch.testing.assert_close(
        by_lk * acceptance(of).detach().double(), by_tv, rtol=1e-4, atol=1e-7
    )


def test_a_draft_equal_to_the_target_has_no_loss_and_alpha_one() -> None:
    state, head, aim = problem()
    same = Aim(aim.row_N, aim.label_N, aim.row_N, head(state).detach())
    for kind in ("kl", "rkl", "jsd", "tv", "lk_alpha", "lk_hybrid"):
        out = head_loss(state, head, same, None, LossOptions(kind))
        assert float(out.sum) == pytest.approx(0.0, abs=1e-5)
        assert float(out.metrics["alpha"][0]) == pytest.approx(N, rel=1e-5)
        assert float(out.metrics["top1"][0]) == N


def test_metrics_under_a_trimmed_vocabulary_count_every_row_in_target_ids() -> None:
    state, head, aim = problem()
    vocab = VocabMap(torch.tensor(KEPT), V)
    same = Aim(aim.row_N, aim.label_N, aim.row_N, head(state).detach())
    out = head_loss(state, lambda x: head(x)[:, list(KEPT)], same, vocab, LossOptions("kl"))
    speakable = sum(int(head(state[row]).argmax()) in KEPT for row in same.row_N)
    assert float(out.metrics["top1"][0]) == speakable < N
    assert float(out.metrics["top1"][1]) == N
    assert float(out.count) == speakable


def test_ce_without_a_teacher_scores_the_label() -> None:
    state, head, aim = problem(teacher=False)
    out = head_loss(state, head, aim, None, LossOptions("ce"))
    expected = torch.nn.functional.cross_entropy(head(state[aim.row_N]), aim.label_N)
    assert float(out.sum) / N == pytest.approx(float(expected), rel=1e-5)
    assert "alpha" not in out.metrics


def test_no_row_to_predict_gives_zero_sum_and_count_and_still_a_graph() -> None:
    state, head, aim = problem()
    none = Aim(aim.row_N[:0], aim.label_N[:0], aim.judge_N[:0], aim.teacher_RV)
    state.requires_grad_()
    out = head_loss(state, head, none, None, LossOptions("kl"))
    assert float(out.sum) == 0.0
    assert float(out.count) == 0.0
    out.sum.backward()


def test_low_precision_logits_are_compared_in_float32() -> None:
    state, head, aim = problem()
    assert aim.teacher_RV is not None
    low = Aim(aim.row_N, aim.label_N, aim.judge_N, aim.teacher_RV.bfloat16())
    out = head_loss(state.bfloat16(), head.bfloat16(), low, None, LossOptions("kl"))
    assert out.sum.dtype == torch.float32


def test_weighted_sum_weighs_sums_and_counts_alike() -> None:
    state, head, aim = problem()
    out = head_loss(state, head, aim, None, LossOptions("kl"))
    both = weighted_sum([(1.0, out), (0.5, out)])
    torch.testing.assert_close(both.sum / both.count, out.sum / out.count)
    assert set(both.metrics) == {"top1", "alpha", "top1/1", "alpha/1"}


def test_an_unknown_loss_names_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match="lk_alpha"):
        check_kind("lk_alfa", "drafter.options.loss")
