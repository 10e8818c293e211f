"""GliDe: what a draft may see of the target, and what its siblings are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.features.glide import Glide, GlideOptions
from specctl.recipes.load import load_recipe
from specctl.runtime.target.variants.inflate import inflate
from specctl_testing.drafters.cross_cases import check_no_depth_sees_a_feature_behind_its_anchor
from specctl_testing.drafters.head_cases import (
    attending_target,
    fit,
    make_heads,
    nearly_markov,
    train,
)
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


@pytest.mark.proof
def test_the_glimpse_and_its_block_mask_are_worth_what_the_paper_says(
    make_model: Any, make_batch: Any
) -> None:
    """Acceptance by what drafting sees: above that of a one-layer language model which does not
    glimpse (the paper's first question); and without the block mask the training loss is lower and
    the third token accepted less often."""
    target, losses, found = attending_target(make_model), {}, {}
    for name, strict in (("glimpse", True), ("blind", True), ("loose", False)):
        drafter = make_heads(target, "glide", num_heads=3, strict=strict)
        if name == "blind":
            drafter.module.cross.o_proj.weight.requires_grad_(False).zero_()
        batch, unseen = (
            make_batch(target, drafter, rows=32, seq_len=24, seed=seed) for seed in (0, 1)
        )
        fit(drafter, batch, 30)
        served = make_heads(target, "glide", num_heads=3)
        served.load_tensors(drafter.tensors())
        with torch.no_grad():
            out, metrics = drafter.loss(batch), served.loss(unseen).metrics
        losses[name] = float(out.sum / out.count)
        keys = ("alpha", "alpha/1", "alpha/2")
        found[name] = [float(metrics[key][0] / metrics[key][1]) for key in keys]
    assert all(a > b + 0.05 for a, b in zip(found["glimpse"], found["blind"], strict=True)), found
    assert losses["loose"] < losses["glimpse"], losses
    assert found["glimpse"][2] > found["loose"][2] + 0.003, found


@pytest.mark.proof
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


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "inflated"])
@torch.no_grad()
def test_it_glimpses_at_the_very_rows_of_the_targets_cache(make_target: Any, kind: str) -> None:
    target = make_target("llama" if kind == "inflated" else kind, num_layers=3, vocab=24)
    if kind == "inflated":
        target = inflate(target, "100m")
    drafter, lm = make_heads(target, "glide"), target.lm
    ids_BT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    slot_B, position_BT = torch.arange(2), torch.arange(5).expand(2, -1)
    kv = lm.new_kv(2, 8)
    kv.begin((0, 1), slot_B, slot_B * 0, 5, 5, 0)
    masks = lm.chain_masks(slot_B * 0, 5, 5)
    taps = lm.forward(ids_BT, position_BT, masks, kv, drafter.needs().taps).taps
    last = (*lm.tap_map.values(),)[2] if kind == "inflated" else 2
    for mine, cached in zip(
        drafter.seen(drafter.gathered(taps), position_BT), kv.read(last), strict=True
    ):
        torch.testing.assert_close(mine, cached[:, : target.spec.num_kv_heads])


def test_of_the_glimpse_only_queries_and_the_way_back_are_its_own(make_target: Any) -> None:
    """At the size of Llama-3-8B by its recipe: the paper's 47M numbers, not the 391M of a layer
    that makes keys and values by itself."""
    drafter = make_heads(make_target(num_layers=2, vocab=24), "glide")
    names = {name.split(".")[1] for name in drafter.tensors() if name.startswith("cross.")}
    assert names & {"q_proj", "k_proj", "v_proj", "o_proj", "self_attn"} == {"q_proj", "o_proj"}
    recipe = load_recipe("llama3-8b-glide")
    spec = ModelSpec("llama", 32, 4096, 128256, 32, 8, 128, 14336, 1e-5, 5e5, 8192)
    with torch.device("meta"):
        kept = VocabMap(torch.arange(32000), spec.vocab_size)
        large = Glide(GlideOptions(**recipe.drafter.options), spec, kept)
    assert sum(p.numel() for p in large.trainable().values()) == pytest.approx(47e6, rel=0.01)


def test_a_target_without_a_cache_to_show_is_named(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    elsewhere = replace(target.borrowed(), lm=None)
    with pytest.raises(IncompatibleError, match="own_keys"):
        make_heads(target, "glide").bind(elsewhere)
    make_heads(target, "glide", own_keys=True).bind(elsewhere)


def test_sizes_out_of_range_are_refused() -> None:
    for name in ("num_heads", "anchors", "width", "intermediate"):
        with pytest.raises(RecipeError, match="too small"):
            GlideOptions(**{name: 0})
