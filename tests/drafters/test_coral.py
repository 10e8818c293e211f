"""CORAL: agreement between steps, and the routed head over the target's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specctl.drafters.losses.step_losses import agreement_loss
from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov


def agreement(drafter: Any, batch: Any) -> float:
    cosine, count = drafter.loss(batch).metrics["agreement"]
    return float(cosine / count)


@pytest.mark.proof
def test_alignment_raises_the_cosine_between_steps(make_model: Any, make_batch: Any) -> None:
    target, found = nearly_markov(make_model), {}
    for weight in (0.0, 1.0):
        drafter = make_heads(target, "coral", align_weight=weight, feature_weight=1.0)
        fit(drafter, make_batch(target, drafter, rows=8, seq_len=32), 25)
        unseen = make_batch(target, drafter, rows=8, seq_len=32, seed=1)
        found[weight] = agreement(drafter, unseen)
    assert found[1.0] > found[0.0] + 0.02, found


def test_alignment_compares_states_of_the_same_feature() -> None:
    torch.manual_seed(0)
    feature_RD = torch.randn(10, 8)
    steps = [feature_RD, feature_RD.roll(-1, 0)]  # row t of step j stands for feature t + j
    at = torch.arange(1, 9)
    right = agreement_loss(steps, [at, at - 1], 0.07)
    wrong = agreement_loss(steps, [at, at], 0.07)
    cosine, count = right.metrics["agreement"]
    assert float(cosine / count) > 0.9999
    assert float(right.sum) < float(wrong.sum)
    unit = F.normalize(feature_RD[at], dim=-1)
    expected = F.cross_entropy(unit @ unit.t() / 0.07, torch.arange(8), reduction="sum")
    torch.testing.assert_close(right.sum, expected)


def test_the_routed_head_reads_rows_of_the_targets_head(make_target: Any, drive: Any) -> None:
    target = make_target(vocab=24)
    whole = make_heads(target, "coral")
    routed = make_heads(target, "coral", head_groups=6, head_top=2)
    routed.module.load_state_dict({**routed.tensors(), **whole.tensors()})
    all_TK = drive(target, whole).chain_logits([5, 17, 3, 8], 3)
    some_TK = drive(target, routed).chain_logits([5, 17, 3, 8], 3)
    is_read = some_TK.isfinite()
    assert is_read.sum(-1).tolist() == [8, 8]
    torch.testing.assert_close(some_TK[is_read], all_TK[is_read])


@pytest.mark.proof
def test_the_router_learns_where_the_targets_mass_is(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "coral", head_groups=6, head_top=2)
    batch = make_batch(target, drafter, rows=8)
    shares = []
    for _ in range(2):
        caught, count = drafter.loss(batch).metrics["routed"]
        shares.append(float(caught / count))
        fit(drafter, batch, 12)
    assert shares[1] > max(shares[0], 2 / 6), shares
