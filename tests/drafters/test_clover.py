"""Clover: what the regressive connection, the augmenting block and the gate are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specctl.core.batch import TrainBatch
from specctl.drafters.nets.cells import CosineCell
from specctl_testing.drafters.head_cases import fit, learned, make_heads, nearly_markov


@pytest.mark.proof
def test_without_drafted_tokens_later_heads_fall_to_medusas_level(
    make_model: Any, make_batch: Any
) -> None:
    target = nearly_markov(make_model)
    whole = learned(target, "clover", make_batch, layers=0)
    blind = learned(target, "clover", make_batch, layers=0, regressive=False)
    medusa = learned(target, "medusa", make_batch)
    assert all(a > b + 0.05 for a, b in zip(whole[1:], blind[1:], strict=True)), (whole, blind)
    assert all(abs(a - b) < 0.03 for a, b in zip(blind[1:], medusa[1:], strict=True)), medusa


def periodic(rows: int, seed: int) -> TrainBatch:
    """Rows that repeat three tokens: token t + 2 is token t - 1, which f_t hardly tells."""
    generator = torch.Generator().manual_seed(seed)
    three = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(rows)])
    ids_BS = three.repeat(1, 8)
    at_BS = torch.arange(24).expand_as(ids_BS)
    return TrainBatch(ids_BS, at_BS >= 6, torch.zeros_like(ids_BS), at_BS)


@pytest.mark.proof
def test_the_augmenting_block_finds_what_the_last_state_has_lost(
    make_model: Any, capture_batch: Any
) -> None:
    target, found = nearly_markov(make_model, vocab=12), {}
    for layers in (0, 1):
        drafter = make_heads(
            target, "clover", num_heads=1, layers=layers, loss="ce", feature_weight=0.0
        )
        seen, unseen = (
            capture_batch(target, drafter, periodic(rows, seed))
            for rows, seed in ((96, 0), (32, 1))
        )
        fit(drafter, seen, 60, 4e-3)
        right, count = drafter.loss(unseen).metrics["top1"]
        found[layers] = float(right / count)
    assert found[1] > found[0] + 0.1, found


def test_the_gate_weighs_a_token_by_the_cosine_of_query_and_key() -> None:
    torch.manual_seed(0)
    cell = CosineCell(8, num_heads=2, eps=1e-6)
    state_D, token_D = torch.randn(8), torch.randn(8)
    torch.testing.assert_close(cell(state_D, token_D), state_D)  # fresh: values are zero
    torch.nn.init.eye_(cell.value.weight)
    gates = [F.cosine_similarity(state_D[at], token_D[at], dim=0) for at in (slice(4), slice(4, 8))]
    expected = state_D + torch.cat([gates[0] * token_D[:4], gates[1] * token_D[4:]])
    torch.testing.assert_close(cell(state_D, token_D), expected)


def test_later_steps_share_one_set_of_weights(make_target: Any) -> None:
    target = make_target()
    three, six = (make_heads(target, "clover", num_heads=k) for k in (3, 6))
    assert {n: t.shape for n, t in three.tensors().items()} == {
        n: t.shape for n, t in six.tensors().items()
    }


def test_tokens_are_read_as_rows_of_the_targets_head(make_target: Any) -> None:
    target = make_target()
    drafter = make_heads(target, "clover")
    ids = torch.tensor([7, 0, 95])
    torch.testing.assert_close(drafter.head_row(ids), target.borrowed().head_VD[ids])
