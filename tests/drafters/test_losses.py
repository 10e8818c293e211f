"""Losses against naive formulas, with masks, trimming and chunks. N rows, V target, K draft ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specctl.core.batch import HeadRows
from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import (
    KINDS,
    LinearHead,
    LossOptions,
    TeacherLogits,
    _width,
    acceptance,
    distributions,
    head_loss,
    weighted_sum,
)

V, D, N = 11, 6, 9
KEPT = (0, 2, 3, 5, 8, 9)
FORMULAS = ("ce", "kl", "rkl", "jsd", "tv", "lk_alpha", "lk_hybrid")


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


def problem(teacher: bool = True) -> tuple[Tensor, Any, AlignedRows]:
    torch.manual_seed(0)
    state = torch.randn(N + 4, D, dtype=torch.float64)
    head = torch.nn.Linear(D, V, bias=False, dtype=torch.float64)
    rows = torch.randperm(N + 4)[:N]
    logits = torch.randn(N + 4, V, dtype=torch.float64) * 2 if teacher else None
    return state, head, AlignedRows(rows, torch.randint(0, V, (N,)), (rows + 1) % (N + 4), logits)


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_equals_its_formula_row_by_row(kind: str, temperature: float) -> None:
    state, head, aim = problem()
    out = head_loss(state, head, aim, None, LossOptions(kind, temperature))
    assert aim.teacher_RV is not None
    expected = 0.0
    for row, label, teacher in zip(aim.row_Q, aim.label_Q, aim.teacher_row_Q, strict=True):
        scale = 1.0 if kind == "ce" else temperature
        q = (head(state[row]) / scale).softmax(-1)
        p = (aim.teacher_RV[teacher] / scale).softmax(-1)
        expected += float(naive(kind, p, q, int(label)).detach())
    assert float(out.sum.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(out.count) == N


@pytest.mark.parametrize("kind", FORMULAS)
def test_trimmed_loss_restricts_the_distribution_and_skips_cut_rows(kind: str) -> None:
    state, head, aim = problem()
    vocab = VocabMap(torch.tensor(KEPT), V)
    out = head_loss(state, lambda x: head(x)[:, list(KEPT)], aim, vocab, LossOptions(kind))
    assert aim.teacher_RV is not None
    expected, count = 0.0, 0
    for row, label, teacher in zip(aim.row_Q, aim.label_Q, aim.teacher_row_Q, strict=True):
        p = aim.teacher_RV[teacher].softmax(-1)
        q = head(state[row])[list(KEPT)].softmax(-1)
        wanted = int(label) if kind == "ce" else int(p.argmax())
        if kind in ("tv", "lk_alpha"):
            alpha = torch.minimum(p[list(KEPT)], q).sum()
            expected += float(1 - alpha if kind == "tv" else -alpha.log())
            count += 1
        elif wanted in KEPT:
            kept = p[list(KEPT)] / p[list(KEPT)].sum()
            if kind == "lk_hybrid":  # acceptance is always that of the full distribution
                alpha = torch.minimum(p[list(KEPT)], q).sum()
                weight = (-3 * alpha).exp()
                expected += float(weight * naive("kl", kept, q, 0) + (1 - weight) * (1 - alpha))
            else:
                at = KEPT.index(wanted)
                expected += float(naive(kind, kept, q, at))
            count += 1
    assert float(out.sum) == pytest.approx(expected, rel=1e-5)
    assert float(out.count) == count


def gradients(kind: str, chunk: int | None, linear: bool, kept: tuple[int, ...]) -> list[Tensor]:
    """Loss and gradients of states, matrix and bias; a head that is no matrix goes by recompute."""
    state, head, aim = problem()
    state.requires_grad_()
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    rows = list(kept)
    vocab = VocabMap(torch.tensor(kept), V) if len(kept) < V else None

    def plain(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, head.weight[rows], bias[rows])

    used = LinearHead(head.weight[rows], bias[rows]) if linear else plain
    out = head_loss(state, used, aim, vocab, LossOptions(kind, 0.8, chunk))
    (0.7 * out.sum).backward()
    return [out.sum.detach(), state.grad, head.weight.grad, bias.grad]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [KEPT, tuple(range(V))], ids=["trimmed", "whole"])
def test_gradients_taken_slice_by_slice_are_those_of_autograd_in_float64(
    kind: str, kept: tuple[int, ...]
) -> None:
    whole = gradients(kind, None, linear=False, kept=kept)
    assert whole[2].abs().max() > 1e-3
    for chunk, linear in ((None, True), (2, True), (2, False), (1, True)):
        sliced = gradients(kind, chunk, linear, kept)
        for one, other in zip(whole, sliced, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    again = gradients(kind, 2, linear=True, kept=kept)
    for one, other in zip(gradients(kind, 2, linear=True, kept=kept), again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_slope_of_the_loss(kind: str) -> None:
    state, head, aim = problem()
    options = LossOptions("kl" if kind == "lk_hybrid" else kind, chunk=4)

    def loss(*at: Tensor) -> Tensor:
        return head_loss(at[0], LinearHead(at[1]), aim, None, options).sum

    inputs = (state.requires_grad_(), head.weight)
    grads = torch.autograd.grad(loss(*inputs), inputs)
    for _ in range(3):
        ways = [torch.randn_like(x) for x in inputs]
        there, back = (
            loss(*(x.detach() + step * way for x, way in zip(inputs, ways, strict=True)))
            for step in (1e-6, -1e-6)
        )
        slope = sum((g * way).sum() for g, way in zip(grads, ways, strict=True))
        assert float(slope) == pytest.approx(float(there - back) / 2e-6, rel=1e-5, abs=1e-7)


def test_the_hybrid_gradient_mixes_kl_and_tv_with_a_weight_that_has_none() -> None:
    state, head, aim = problem()
    one = AlignedRows(aim.row_Q[:1], aim.label_Q[:1], aim.teacher_row_Q[:1], aim.teacher_RV)
    state.requires_grad_()
    outs = {k: head_loss(state, head, one, None, LossOptions(k)) for k in ("lk_hybrid", "kl", "tv")}
    slope = {k: torch.autograd.grad(out.sum, state)[0] for k, out in outs.items()}
    weight = torch.exp(-3 * outs["kl"].metrics["alpha"][0])
    mixed = weight * slope["kl"] + (1 - weight) * slope["tv"]
    torch.testing.assert_close(slope["lk_hybrid"], mixed, rtol=1e-10, atol=1e-12)


def test_teacher_rows_computed_when_asked_are_worth_the_logits() -> None:
    state, head, aim = problem()
    source, weight = torch.randn(N + 4, 3).double(), torch.randn(V, 3).double()
    asked = AlignedRows(aim.row_Q, aim.label_Q, aim.teacher_row_Q, HeadRows(source, weight))
    ready = AlignedRows(aim.row_Q, aim.label_Q, aim.teacher_row_Q, source @ weight.t())
    for vocab in (None, VocabMap(torch.arange(V), V)):
        outs = [head_loss(state, head, a, vocab, LossOptions("kl", 0.7, 4)) for a in (asked, ready)]
        torch.testing.assert_close(outs[0].sum, outs[1].sum)
        teacher = TeacherLogits.of(asked.teacher_RV or source, aim.teacher_row_Q, 0.7, 2)
        shared = head_loss(state, head, ready, vocab, LossOptions("kl", 0.7, 4), teacher)
        torch.testing.assert_close(shared.sum, outs[0].sum)


def test_a_judge_that_knows_the_whole_distribution_computes_draft_ids_alone_and_says_the_same() -> (
    None
):
    _, _, aim = problem()
    source, weight = torch.randn(N + 4, 3).double(), torch.randn(V, 3).double()
    bias, ids = torch.randn(V).double(), torch.tensor([0, 2, V - 1])
    asked = HeadRows(source, weight, bias)
    whole = TeacherLogits.of(asked, aim.teacher_row_Q, 0.7, 2)
    part = whole.over(ids)
    assert part.logits_RK is not None
    assert part.logits_RK.shape == (N + 4, 3)
    weight.fill_(float("nan"))  # the whole head is not asked again
    found = part.distribution(aim.teacher_row_Q, ids)
    logits = F.linear(source, part.logits_RK.weight_VD, bias[ids])[aim.teacher_row_Q] / 0.7
    assert whole.log_z_R is not None
    torch.testing.assert_close(found.log_p_QK, logits - whole.log_z_R[aim.teacher_row_Q, None])
    assert bool((found.log_p_QK.exp().sum(-1) < 1).all()), "some of p lies on ids that were cut"
    alone = TeacherLogits(asked, 0.7)
    assert alone.over(ids) is alone, (
        "whoever reads a row once needs the whole distribution for its norm"
    )


def test_tv_is_one_minus_alpha_and_minus_log_alpha_is_ce_against_a_one_hot_distribution() -> None:
    state, head, aim = problem()
    out = head_loss(state, head, aim, None, LossOptions("tv"))
    torch.testing.assert_close(out.sum, out.count - out.metrics["alpha"][0])
    sure = torch.full((N + 4, V), -60.0, dtype=torch.float64)
    sure[aim.teacher_row_Q, aim.label_Q] = 60.0
    certain = AlignedRows(aim.row_Q, aim.label_Q, aim.teacher_row_Q, sure)
    lk, ce = (head_loss(state, head, certain, None, LossOptions(k)).sum for k in ("lk_alpha", "ce"))
    torch.testing.assert_close(lk, ce)


def test_jensen_shannon_is_symmetric_bounded_and_the_two_kl_are_mirrored() -> None:
    state, head, aim = problem()
    assert isinstance(aim.teacher_RV, Tensor)
    mine = head(state).detach()
    swapped = AlignedRows(aim.teacher_row_Q, aim.label_Q, aim.row_Q, mine)

    def of(kind: str, logits: Tensor, against: AlignedRows) -> Tensor:
        return head_loss(logits, torch.nn.Identity(), against, None, LossOptions(kind)).sum

    there = of("jsd", mine, aim)
    torch.testing.assert_close(there, of("jsd", aim.teacher_RV, swapped))
    assert 0 < float(there) < N * torch.log(torch.tensor(2.0))
    torch.testing.assert_close(of("kl", mine, aim), of("rkl", aim.teacher_RV, swapped))


def test_only_selected_rows_are_summed_and_metrics_still_count_all() -> None:
    state, head, aim = problem()
    seen: list[Tensor] = []

    def every_other(kl_Q: Tensor) -> Tensor:
        seen.append(kl_Q)
        return torch.arange(len(kl_Q)) % 2 == 0

    chosen = AlignedRows(aim.row_Q, aim.label_Q, aim.teacher_row_Q, aim.teacher_RV, every_other)
    out = head_loss(state, head, chosen, None, LossOptions("kl", chunk=4))
    whole = head_loss(state, head, aim, None, LossOptions("kl"))
    torch.testing.assert_close(seen[0].sum(), whole.sum)
    torch.testing.assert_close(out.sum, seen[0][::2].sum())
    assert float(out.count) == len(seen[0][::2]) == float(out.metrics["selected"][0])
    assert float(out.metrics["selected"][1]) == N
    for name in ("top1", "alpha"):
        torch.testing.assert_close(out.metrics[name], whole.metrics[name])


def test_rows_whose_best_id_was_cut_are_not_offered_for_selection() -> None:
    state, head, aim = problem()
    vocab = VocabMap(torch.tensor(KEPT), V)
    whole = head_loss(state, lambda x: head(x)[:, list(KEPT)], aim, vocab, LossOptions("kl"))
    asked: list[int] = []

    def everything(kl_Q: Tensor) -> Tensor:
        asked.append(len(kl_Q))
        return torch.ones_like(kl_Q, dtype=torch.bool)

    chosen = AlignedRows(aim.row_Q, aim.label_Q, aim.teacher_row_Q, aim.teacher_RV, everything)
    out = head_loss(state, lambda x: head(x)[:, list(KEPT)], chosen, vocab, LossOptions("kl"))
    torch.testing.assert_close(out.sum, whole.sum)
    assert asked == [int(whole.count)]
    assert asked[0] < N


def test_gradient_of_minus_log_alpha_is_that_of_tv_over_alpha() -> None:
    state, head, aim = problem()
    one = AlignedRows(aim.row_Q[:1], aim.label_Q[:1], aim.teacher_row_Q[:1], aim.teacher_RV)
    state.requires_grad_()
    (by_lk,) = torch.autograd.grad(
        head_loss(state, head, one, None, LossOptions("lk_alpha")).sum, state
    )
    (by_tv,) = torch.autograd.grad(head_loss(state, head, one, None, LossOptions("tv")).sum, state)
    assert one.teacher_RV is not None
    distribution = TeacherLogits(one.teacher_RV).distribution(one.teacher_row_Q, None)
    of = distributions(head(state[one.row_Q]), distribution.log_p_QK, 1.0, is_whole=True)
    torch.testing.assert_close(
        by_lk * acceptance(of).detach().double(), by_tv, rtol=1e-4, atol=1e-7
    )


def test_a_draft_equal_to_the_target_has_no_loss_and_alpha_one() -> None:
    state, head, aim = problem()
    same = AlignedRows(aim.row_Q, aim.label_Q, aim.row_Q, head(state).detach())
    for kind in ("kl", "rkl", "jsd", "tv", "lk_alpha", "lk_hybrid"):
        out = head_loss(state, head, same, None, LossOptions(kind))
        assert float(out.sum) == pytest.approx(0.0, abs=1e-5)
        assert float(out.metrics["alpha"][0]) == pytest.approx(N, rel=1e-5)
        assert float(out.metrics["top1"][0]) == N


def test_metrics_under_a_trimmed_vocabulary_count_every_row_in_target_ids() -> None:
    state, head, aim = problem()
    vocab = VocabMap(torch.tensor(KEPT), V)
    same = AlignedRows(aim.row_Q, aim.label_Q, aim.row_Q, head(state).detach())
    out = head_loss(state, lambda x: head(x)[:, list(KEPT)], same, vocab, LossOptions("kl"))
    speakable = sum(int(head(state[row]).argmax()) in KEPT for row in same.row_Q)
    assert float(out.metrics["top1"][0]) == speakable < N
    assert float(out.metrics["top1"][1]) == N
    assert float(out.count) == speakable


def test_ce_without_a_teacher_scores_the_label() -> None:
    state, head, aim = problem(teacher=False)
    out = head_loss(state, head, aim, None, LossOptions("ce"))
    expected = torch.nn.functional.cross_entropy(head(state[aim.row_Q]), aim.label_Q)
    assert float(out.sum) / N == pytest.approx(float(expected), rel=1e-5)
    assert "alpha" not in out.metrics


def test_no_row_to_predict_gives_zero_sum_and_count_and_still_a_graph() -> None:
    state, head, aim = problem()
    none = AlignedRows(aim.row_Q[:0], aim.label_Q[:0], aim.teacher_row_Q[:0], aim.teacher_RV)
    state.requires_grad_()
    out = head_loss(state, head, none, None, LossOptions("kl"))
    assert float(out.sum) == 0.0
    assert float(out.count) == 0.0
    out.sum.backward()


def test_low_precision_logits_are_compared_in_float32() -> None:
    state, head, aim = problem()
    assert isinstance(aim.teacher_RV, Tensor)
    low = AlignedRows(aim.row_Q, aim.label_Q, aim.teacher_row_Q, aim.teacher_RV.bfloat16())
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
        LossOptions("lk_alfa")


class Products(TorchDispatchMode):
    """Result dtypes of the matrix products that have a side of `width`, and casts of its matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.dtypes, self.casts = width, list[torch.dtype](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm") and self.width in out.shape:
            self.dtypes.append(out.dtype)
        if name == "_to_copy" and out.shape == (self.width, D):
            self.casts += 1
        return out


def test_under_autocast_the_head_is_cast_once_and_no_product_is_in_float32() -> None:
    K, rows = 37, 64
    torch.manual_seed(0)
    weight = torch.randn(K, D, requires_grad=True)
    state = torch.randn(rows, D, requires_grad=True)
    at = torch.arange(rows)
    aligned = AlignedRows(at, at % K, at, torch.randn(rows, K))
    with Products(K) as seen, torch.autocast("cpu", torch.bfloat16):
        out = head_loss(state, LinearHead(weight), aligned, None, LossOptions(chunk=16))
        out.sum.backward()
    assert len(seen.dtypes) >= 2 * rows // 16, "logits and the matrix's gradient, slice by slice"
    assert set(seen.dtypes) == {torch.bfloat16}
    assert seen.casts == 1
    assert weight.grad is not None
    half = weight.grad.clone()
    weight.grad = None
    head_loss(state, LinearHead(weight), aligned, None, LossOptions()).sum.backward()
    assert (half - weight.grad).norm() < 0.02 * weight.grad.norm()


def test_slices_count_the_draft_vocabulary_once_the_targets_is_read() -> None:
    vocab = VocabMap(torch.arange(1_000), 100_000)
    known = TeacherLogits(torch.zeros(1, 100_000), log_z_R=torch.zeros(1), best_R=torch.zeros(1))
    assert _width(known, vocab) == 1_000
    assert _width(TeacherLogits(torch.zeros(1, 100_000)), vocab) == 100_000
    assert _width(known, None) == 100_000


@pytest.mark.parametrize("temperature", [1.0, 1.3])
@pytest.mark.parametrize("known", [True, False])
def test_a_few_ids_of_a_row_have_the_probabilities_of_the_whole_row(
    temperature: float, known: bool
) -> None:
    torch.manual_seed(0)
    state_RD, weight_VD, bias_V = torch.randn(N, D), torch.randn(V, D), torch.randn(V)
    logits_RV = state_RD @ weight_VD.T + bias_V
    row_Q, ids_QC = torch.tensor([4, 0, 4]), torch.tensor([[1, 7], [2, 0], [10, 3]])
    expected_QC = (logits_RV / temperature).log_softmax(-1)[row_Q[:, None], ids_QC]
    for source in (logits_RV, HeadRows(state_RD, weight_VD, bias_V)):
        teacher = TeacherLogits(source, temperature)
        if known:
            teacher = TeacherLogits.of(source, torch.arange(N), temperature, 4)
        torch.testing.assert_close(teacher.at(row_Q, ids_QC), expected_QC)
        assert torch.equal(teacher.best(row_Q), logits_RV.argmax(-1)[row_Q])
