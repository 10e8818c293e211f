"""GliDe: what a draft may see of the target, and what its siblings are worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.glide import GlideOptions
from specctl_testing.drafters.cross_cases import check_no_depth_sees_a_feature_behind_its_anchor
from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov, train
from specctl_testing.drafters.parallel_runs import decode


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


def test_without_the_block_mask_training_looks_better_and_deep_drafts_are_worse(
    make_target: Any, make_batch: Any
) -> None:
    """Measured by what drafting sees, on a target whose states say much of the next token."""
    target, losses, deep = make_target(num_layers=2, vocab=24), {}, {}
    for strict in (True, False):
        drafter = make_heads(target, "glide", num_heads=3, strict=strict)
        batch, unseen = (
            make_batch(target, drafter, rows=48, seq_len=24, seed=seed) for seed in (0, 1)
        )
        fit(drafter, batch, 40)
        served = make_heads(target, "glide", num_heads=3)
        served.load_tensors(drafter.tensors())
        with torch.no_grad():
            out, metrics = drafter.loss(batch), served.loss(unseen).metrics
        losses[strict] = float(out.sum / out.count)
        deep[strict] = float(metrics["alpha/2"][0] / metrics["alpha/2"][1])
    assert losses[False] < losses[True], losses
    assert deep[True] > deep[False] + 0.003, deep


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
