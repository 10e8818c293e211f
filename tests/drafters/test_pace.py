"""D-PACE: weights are what the expected length of a draft gains, and losses take them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.drafters.losses import fused_kl
from specctl.drafters.losses.align import AlignedRows, ahead_mask, aim
from specctl.drafters.losses.head_losses import (
    KINDS,
    LinearHead,
    LossOptions,
    TeacherLogits,
    accepted,
    head_loss,
)
from specctl.drafters.losses.pace import paced, paces
from specctl.drafters.nets.options import read_options
from specctl.models.native import kl
from specctl_testing.drafters.head_cases import make_heads

P, R, D, V = 3, 5, 8, 30
WITH_OPTION = [
    name
    for name, family in sorted(families().items())
    if "d_pace" in {each.name for each in fields(family.options)}
]


def test_weights_are_the_derivative_of_the_expected_length() -> None:
    """By log c, which is what a loss of -log c changes (eq. 8)."""
    log_c_PR = torch.rand(P, R).log().requires_grad_()
    length = log_c_PR.exp().cumprod(0).sum()
    (wanted_PR,) = torch.autograd.grad(length, log_c_PR)
    torch.testing.assert_close(paces(log_c_PR.detach().exp(), torch.ones(P, R)), wanted_PR)


def test_places_behind_the_end_count_for_nothing() -> None:
    """A draft of three places of which the last has no token is one of two."""
    chance_PR, wanted_PR = torch.rand(P, R), torch.ones(P, R)
    wanted_PR[2] = 0.0
    chance_PR[2] = 1.0
    found_PR = paces(chance_PR, wanted_PR)
    torch.testing.assert_close(found_PR[:2], paces(chance_PR[:2], wanted_PR[:2]))
    assert not found_PR[2].any()


def places(teacher: bool, vocab: VocabMap | None) -> list[tuple[Tensor, LinearHead, AlignedRows]]:
    """One document of sixteen tokens, three heads of one matrix."""
    torch.manual_seed(3)
    ids_BS, whole = torch.randint(0, V, (1, 16)), torch.ones(1, 16, dtype=torch.long)
    batch = TrainBatch(ids_BS, whole.bool(), whole * 0, torch.arange(16)[None])
    if teacher:
        batch = replace(batch, teacher_BSV=3 * torch.randn(1, 16, V))
    head = LinearHead(torch.randn(V if vocab is None else vocab.size, D))
    return [(torch.randn(16, D, requires_grad=True), head, aim(batch, 2 + i)) for i in range(P)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_each_row_counts_by_its_weight(kind: str, is_trimmed: bool) -> None:
    """Loss and gradient of weighted rows are the sum of those of the rows by themselves."""
    vocab = VocabMap(torch.arange(0, V, 2), V) if is_trimmed else None
    options = LossOptions(kind, chunk=4)
    for state_RD, head, rows in places(kind != "ce", vocab):
        weight_Q = torch.rand(len(rows.row_Q))
        whole = head_loss(state_RD, head, replace(rows, weight_Q=weight_Q), vocab, options)
        (gradient,) = torch.autograd.grad(whole.sum, state_RD)
        total, count, wanted = 0.0, 0.0, torch.zeros_like(gradient)
        for q, weight in enumerate(weight_Q.tolist()):
            only = rows.only(torch.arange(len(weight_Q)) == q)
            one = head_loss(state_RD, head, only, vocab, options)
            total, count = (
                total + weight * float(one.sum.detach()),
                count + weight * float(one.count),
            )
            wanted += weight * torch.autograd.grad(one.sum, state_RD)[0]
        assert float(whole.sum) == pytest.approx(total, rel=1e-5)
        assert float(whole.count) == pytest.approx(count, rel=1e-5)
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_the_chance_is_alpha_or_the_probability_of_the_text(is_trimmed: bool) -> None:
    ids_K = torch.arange(0, V, 2) if is_trimmed else torch.arange(V)
    vocab = VocabMap(ids_K, V) if is_trimmed else None
    state_RD, head, rows = places(True, vocab)[0]
    q_QV = torch.zeros(len(rows.row_Q), V)
    q_QV[:, ids_K] = head(state_RD[rows.row_Q]).softmax(-1).detach()
    assert isinstance(rows.teacher_RV, Tensor)
    p_QV = rows.teacher_RV[rows.teacher_row_Q].softmax(-1)
    found = accepted(state_RD, head, rows, vocab, LossOptions("kl", chunk=4), _teacher(rows))
    torch.testing.assert_close(found, torch.minimum(p_QV, q_QV).sum(-1))
    found = accepted(state_RD, head, rows, vocab, LossOptions("ce"), None)
    torch.testing.assert_close(found, q_QV.gather(1, rows.label_Q[:, None])[:, 0])


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_compiled_and_plain_rows_agree(monkeypatch: pytest.MonkeyPatch, is_trimmed: bool) -> None:
    """Chances, loss and gradient with weights, by the compiled call and by PyTorch's operators."""
    vocab = VocabMap(torch.arange(0, V, 2), V) if is_trimmed else None
    made = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(fused_kl, "is_compiled_for", lambda *given: False)
            monkeypatch.setattr(kl, "is_compiled_for", lambda *given: False)
        drafted, options = places(True, vocab), LossOptions("kl")
        rows = paced(drafted, vocab, options, _teacher(drafted[0][2]), 0.25)
        out = head_loss(drafted[0][0], drafted[0][1], rows[0], vocab, options)
        (gradient,) = torch.autograd.grad(out.sum, drafted[0][0])
        made.append((rows[0].weight_Q, out.sum.detach(), out.count, gradient))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)


def _teacher(rows: AlignedRows) -> TeacherLogits:
    assert isinstance(rows.teacher_RV, Tensor)
    return TeacherLogits(rows.teacher_RV, 1.0)


@pytest.mark.parametrize(
    ("family", "anchors"),
    [("medusa", {}), ("dflash", {"anchors": 99}), ("hidden-transfer", {"anchors": 99})],
)
def test_families_weigh_their_depths_by_it(
    make_target: Any, make_batch: Any, family: str, anchors: dict[str, int]
) -> None:
    """Fully smoothed, every depth weighs as many tokens as can be predicted from it on: a draft of
    n counts n (n + 1) / 2 times."""
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, family, num_heads=3, d_pace=1.0, **anchors)
    batch = make_batch(target, drafter)
    wanted = torch.stack([ahead_mask(batch, 2 + i) for i in range(3)]).sum(0)
    out = drafter.loss(batch)
    assert float(out.count) == pytest.approx(float((wanted * (wanted + 1) / 2).sum()))
    out.sum.backward()
    grown = make_heads(target, family, num_heads=3, d_pace=0.25, **anchors)
    assert float(grown.loss(batch).count) < float(out.count)


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_under_autocast_weights_stay_in_float32(kind: str) -> None:
    """Chances come from products in bfloat16, whose rounding is all that changes."""
    given = places(True, None)
    options = LossOptions(kind)  # type: ignore[arg-type]
    plain = paced(given, None, options, _teacher(given[0][2]), 0.25)
    with torch.autocast("cpu", torch.bfloat16):
        half = paced(given, None, options, _teacher(given[0][2]), 0.25)
    for one, other in zip(plain, half, strict=True):
        assert other.weight_Q is not None
        assert other.weight_Q.dtype == torch.float32
        torch.testing.assert_close(other.weight_Q, one.weight_Q, rtol=0.05, atol=0.02)
        assert not torch.equal(other.weight_Q, one.weight_Q), "the products are in bfloat16"


def test_selected_rows_keep_their_weights() -> None:
    """A loss over a part of the rows weighs these as it would weigh them by themselves."""
    state_RD, head, rows = places(True, None)[0]
    rows = replace(rows, weight_Q=torch.rand(len(rows.row_Q)))
    keep_Q = torch.arange(len(rows.row_Q)) % 2 == 0
    chosen = replace(rows, select=lambda apart_Q: keep_Q)
    found = head_loss(state_RD, head, chosen, None, LossOptions("kl", chunk=4))
    wanted = head_loss(state_RD, head, rows.only(keep_Q), None, LossOptions("kl", chunk=4))
    torch.testing.assert_close(found.sum, wanted.sum)
    torch.testing.assert_close(found.count, wanted.count)


@pytest.mark.parametrize("name", WITH_OPTION)
def test_an_option_that_a_family_would_ignore_is_refused(
    make_target: Any, make_batch: Any, name: str
) -> None:
    """Whoever takes `d_pace` weighs by it."""
    if name in ("k-forcing", "p-eagle"):
        with pytest.raises(ValidationError):
            read_options(families()[name].options, {"d_pace": 0.5})
        return
    target = make_target(num_layers=3, vocab=24)
    found = []
    for smoothing in (None, 1.0):
        torch.manual_seed(0)
        drafter = make_heads(target, name, num_heads=2, d_pace=smoothing)
        batch = make_batch(target, drafter)
        torch.manual_seed(0)
        found.append(float(drafter.loss(batch).count))
    assert found[0] != pytest.approx(found[1])
