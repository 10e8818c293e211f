"""Recurrent Drafter: the recurrence, beams merged into one tree, drafts longer than trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specctl.core.errors import RecipeError
from specctl.drafters.heads.recurrent import RecurrentOptions
from specctl_testing.drafters.head_cases import alphas, make_heads, nearly_markov, train
from specctl_testing.drafters.parallel_runs import decode


@pytest.fixture(scope="module")
def target(make_model: Any) -> Any:
    return nearly_markov(make_model)


@pytest.fixture(scope="module")
def drafter(target: Any, make_batch: Any) -> Any:
    made = make_heads(target, "recurrent", num_heads=3)
    train(target, made, make_batch, 40)
    return made


def test_a_step_is_the_published_cell(target: Any, drafter: Any) -> None:
    tensors, tokens = drafter.tensors(), torch.tensor([[3], [8]])
    state_1D = torch.randn(1, target.spec.hidden_size)
    carry_1C, memory_1D = drafter.begin(state_1D), torch.zeros_like(state_1D)
    for depth, token in enumerate(tokens):
        carry_1C = drafter.read(depth, carry_1C, token)
        memory_1D = F.silu(
            F.linear(drafter.embed(token), tensors["cell.token.weight"], tensors["cell.token.bias"])
            + F.linear(memory_1D, tensors["cell.state.weight"])
        )
        torch.testing.assert_close(carry_1C, torch.cat([state_1D, memory_1D], dim=-1))


def test_a_recurrence_beats_a_sum_that_forgets_the_order(
    target: Any, drafter: Any, make_batch: Any
) -> None:
    plain = make_heads(target, "recurrent", num_heads=3, cell="sum")
    train(target, plain, make_batch, 40)
    ordered, unordered = alphas(target, drafter, make_batch), alphas(target, plain, make_batch)
    assert all(a > b + 0.01 for a, b in zip(ordered[1:], unordered[1:], strict=True)), (
        ordered,
        unordered,
    )


def test_merged_beams_are_whole_candidates_in_fewer_tokens(target: Any, drafter: Any) -> None:
    """Each tree holds `beam` different paths of full length and no other leaf; their common
    beginnings stand once."""
    ran = decode(target, drafter, tokens=24, length=4, beam=4, policy="merged-beams")
    saved = 0
    for outcome in ran.outcomes[:-2]:
        tree = outcome.tree
        valid, parent = tree.valid_BN[0], tree.parent_BN[0]
        inner = set(parent[valid].tolist())
        depth_N = tree.depth_BT()[0, 1:]
        leaves = [n for n in valid.nonzero()[:, 0].tolist() if n not in inner]
        if tree.depth == 4:
            assert len(leaves) == 4
            assert {int(depth_N[n]) for n in leaves} == {4}
            saved += 16 - int(valid.sum())
    assert saved > 0
    assert ran.answers == decode(target, None, tokens=24).answers


def test_tau_grows_with_the_beam(target: Any, drafter: Any) -> None:
    prompts = [[a, b, a] for a, b in ((3, 7), (9, 2), (14, 20), (23, 1), (5, 11), (18, 6))]
    taus = [
        decode(target, drafter, prompts, length=4, beam=beam, slots=6, policy="merged-beams").tau
        for beam in (1, 3, 8)
    ]
    assert taus[0] < taus[1] <= taus[2], taus


def test_drafts_may_be_longer_than_any_in_training(target: Any, drafter: Any, drive: Any) -> None:
    logits_TK = drive(target, drafter).chain_logits([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 2)
    assert logits_TK.shape == (9, 24)
    assert len(logits_TK.unique(dim=0)) == 9


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(RecipeError, match="unknown cell"):
        RecurrentOptions(cell="gru")
