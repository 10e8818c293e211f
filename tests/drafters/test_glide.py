"""GliDe: what a draft may see of the target, and what its siblings are worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cross_cases import check_no_depth_sees_a_feature_behind_its_anchor
from head_cases import make_heads, nearly_markov, train
from parallel_runs import decode

from specctl.drafters.glide import GlideOptions
from specctl.recipes.errors import RecipeError


def test_no_depth_sees_a_feature_behind_its_anchor(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "glide", num_heads=3)
    check_no_depth_sees_a_feature_behind_its_anchor(drafter, make_batch(target, drafter))


def test_without_the_block_mask_training_sees_what_no_draft_has(
    make_target: Any, make_batch: Any
) -> None:
    """The first depth is the same, later ones read features of drafted tokens."""
    target = make_target(num_layers=2, vocab=24)
    strict, loose = (make_heads(target, "glide", num_heads=3, strict=s) for s in (True, False))
    loose.load_tensors(strict.tensors())
    batch = make_batch(target, strict)
    with torch.no_grad():
        first, *later = zip(strict.unroll(batch), loose.unroll(batch), strict=True)
    torch.testing.assert_close(first[0][:, :5], first[1][:, :5])
    for masked, open_to_all in later:
        assert not torch.allclose(masked[:, :5], open_to_all[:, :5])


def test_more_candidates_where_it_is_unsure_lift_what_a_round_emits(
    make_model: Any, make_batch: Any
) -> None:
    target = nearly_markov(make_model)
    drafter = make_heads(target, "glide", num_heads=3)
    train(target, drafter, make_batch, 40)
    chain, comb = (
        decode(target, drafter, tokens=64, length=3, policy=policy) for policy in ("chain", "cape")
    )
    assert chain.answers == comb.answers
    assert comb.tau > chain.tau + 0.2, (comb.tau, chain.tau)


def test_sizes_out_of_range_are_refused() -> None:
    for name in ("num_heads", "anchors"):
        with pytest.raises(RecipeError, match="too small"):
            GlideOptions(**{name: 0})
