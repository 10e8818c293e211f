"""Hydra: what grounding buys, what each head reads, the prefix layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.heads.hydra import HydraOptions
from specctl_testing.drafters.head_cases import learned, make_heads, nearly_markov


@pytest.mark.proof
def test_grounded_heads_beat_independent_ones_after_the_same_steps(
    make_model: Any, make_batch: Any
) -> None:
    """Against Medusa, and against itself with drafted tokens hidden: later heads lose most."""
    target = nearly_markov(make_model)
    grounded = learned(target, "hydra", make_batch)
    for blind in (
        learned(target, "hydra", make_batch, grounded=False),
        learned(target, "medusa", make_batch),
    ):
        assert all(a > b + 0.04 for a, b in zip(grounded, blind, strict=True)), (grounded, blind)


def test_head_i_reads_the_state_and_i_plus_one_embeddings_in_order(make_target: Any) -> None:
    target = make_target()
    drafter = make_heads(target, "hydra", num_heads=3)
    D, tokens = target.spec.hidden_size, torch.tensor([5, 9, 11, 40, 2])
    state_1D = torch.randn(1, D)
    carry_1C = drafter.begin(state_1D)
    for depth in range(5):
        carry_1C = drafter.read(depth, carry_1C, tokens[depth : depth + 1])
        newest = tokens[max(0, depth - 2) : depth + 1]  # three heads look back at most three tokens
        expected = torch.cat([state_1D, drafter.embed(newest).flatten()[None]], dim=-1)
        torch.testing.assert_close(carry_1C[:, : expected.shape[1]], expected)
        assert not carry_1C[:, expected.shape[1] :].any()


def test_heads_grow_with_what_they_read_and_share_nothing(make_target: Any) -> None:
    drafter = make_heads(make_target(), "hydra", num_heads=3, num_blocks=2)
    widths = [head[0].skip.in_features // 32 for head in drafter.module.heads]
    assert widths == [2, 3, 4]
    pointers = [p.data_ptr() for p in drafter.trainable().values()]
    assert len(pointers) == len(set(pointers)) == 3 * (3 + 2 + 1)


def test_the_reconstruction_loss_pulls_states_towards_the_targets(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    target = make_target()
    drafter = make_heads(target, "hydra", num_heads=2, feature_weight=10.0)
    batch = make_batch(target, drafter)

    def distance() -> float:
        total, count = drafter.loss(batch).metrics["feature"]
        return float(total.detach() / count)

    before = distance()
    train_a_little(target, drafter, 20, 3e-3)
    assert distance() < 0.8 * before


def test_sizes_out_of_range_are_refused() -> None:
    for options in ({"num_heads": 0}, {"num_blocks": 0}, {"prefix": -1}):
        with pytest.raises(RecipeError, match="too small"):
            HydraOptions(**options)
