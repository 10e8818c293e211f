"""Mixture of Attentions: the bound on what a draft sees, and attention along the depth."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.drafters.attention.seen import Seen
from specctl.drafters.features.moa import Moa, MoaOptions
from specctl.drafters.nets.blocks import attending
from specctl_testing.drafters.cross_cases import check_no_depth_sees_a_feature_behind_its_anchor
from specctl_testing.drafters.head_cases import alphas, attending_target, fit, make_heads


def test_no_depth_sees_a_feature_behind_its_anchor(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "moa", num_heads=3)
    check_no_depth_sees_a_feature_behind_its_anchor(drafter, make_batch(target, drafter))


def depths(spec: ModelSpec, *leading: int) -> torch.Tensor:
    """Random keys and values side by side, of every layer."""
    return torch.randn(*leading, spec.num_layers, 2 * spec.num_kv_heads * spec.head_dim)


@torch.no_grad()
def test_what_is_summed_up_are_the_keys_and_values_that_every_layer_has_cached(
    make_target: Any,
) -> None:
    """Fresh layer attention is the mean of them."""
    target = make_target(num_layers=3, vocab=24)
    drafter, lm, ids_BT = make_heads(target, "moa"), target.lm, torch.tensor([[3, 1, 4, 1, 5]])
    zero_B, position_BT = torch.zeros(1, dtype=torch.long), torch.arange(5)[None]
    kv = lm.new_kv(1, 8)
    kv.begin((0,), zero_B, zero_B, 5, 5, 0)
    masks = lm.chain_masks(zero_B, 5, 5)
    taps = lm.forward(ids_BT, position_BT, masks, kv, drafter.needs().taps).taps
    cached = [torch.cat([x.transpose(1, 2).flatten(2) for x in kv.read(n)], -1) for n in range(3)]
    summary_BTD = drafter.module.join(torch.stack(cached).mean(0))
    wanted = drafter.net.cross.seen(summary_BTD, drafter.rope(position_BT))
    for mine, theirs in zip(drafter.seen(drafter.gathered(taps), position_BT), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_layer_attention_reads_depths_in_both_directions(make_target: Any) -> None:
    """With one depth changed, what is added to every other depth changes, too."""
    drafter = make_heads(make_target(num_layers=4, vocab=24), "moa")
    drafter.module.along.self_attn.o_proj.weight.normal_(std=0.2)
    one_LD = depths(drafter.spec)
    for changed in (0, 3):
        other_LD = one_LD.clone()
        other_LD[changed] += torch.randn(other_LD.shape[-1])
        first, second = (drafter.summed_up(x[None])[0] for x in (one_LD, other_LD))
        plain = drafter.module.join((other_LD - one_LD).mean(0))
        assert not torch.allclose(second - first, plain, atol=1e-3)


@torch.no_grad()
def test_without_layer_attention_the_depths_have_no_order(make_target: Any) -> None:
    """What the target thought early and what it thought late are then one and the same."""
    target = make_target(num_layers=4, vocab=24)
    one_LD = depths(target.spec)
    for layer_attention in (True, False):
        drafter = make_heads(target, "moa", layer_attention=layer_attention)
        if layer_attention:
            drafter.module.along.self_attn.o_proj.weight.normal_(std=0.2)
        first, second = (drafter.summed_up(x[None]) for x in (one_LD, one_LD.flip(0)))
        assert torch.allclose(first, second, atol=1e-4) != layer_attention


def test_layer_attention_is_cheap_beside_the_target() -> None:
    """Of Llama-3-8B: all its depths cost an eighth of a forward, not as much as one."""
    spec = ModelSpec("llama", 32, 4096, 128256, 32, 8, 128, 14336, 1e-5, 5e5, 8192)
    with torch.device("meta"):
        along = Moa(MoaOptions(), spec).module.along
    assert along is not None
    assert along.self_attn.q_proj.in_features == 2048
    assert 32 * sum(p.numel() for p in along.parameters()) < 8e9 / 8


@torch.no_grad()
def test_target_layers_make_of_the_targets_own_states_what_the_target_makes(
    make_target: Any, make_batch: Any
) -> None:
    """Behind every anchor: the drafted tokens see the text's cached rows and each other."""
    target = make_target(num_layers=3, vocab=24)
    drafter = make_heads(target, "moa", num_heads=3, target_layers=2)
    batch = make_batch(target, drafter, rows=2)
    anchor_BA = torch.tensor([[0, 4], [1, 11]])
    for depth in range(3):
        at_BA = anchor_BA + 1 + depth
        to_BAD = at_BA[:, :, None].expand(-1, -1, target.spec.hidden_size)
        path = [(anchor_BA + 1 + d)[:, :, None].expand_as(to_BAD) for d in range(3)]
        true_BAPD = torch.stack([batch.taps[1].gather(1, to) for to in path], dim=2)
        made_BAPD = drafter._behind(true_BAPD, batch, anchor_BA)
        wanted_BAD = batch.taps[3].gather(1, to_BAD)
        torch.testing.assert_close(made_BAPD[:, :, depth], wanted_BAD, rtol=1e-4, atol=1e-4)


@pytest.mark.proof
def test_a_layer_of_the_target_at_the_end_raises_acceptance(
    make_model: Any, make_batch: Any
) -> None:
    target, found = attending_target(make_model), {}
    for count in (0, 1):
        drafter = make_heads(target, "moa", num_heads=3, target_layers=count)
        fit(drafter, make_batch(target, drafter, rows=16), 30)
        copy.deepcopy(drafter)  # as packaging does: nothing of a batch is left
        found[count] = alphas(target, drafter, make_batch)
    assert all(b > a + 0.02 for a, b in zip(found[0], found[1], strict=True)), found


def test_a_target_whose_layers_are_elsewhere_is_refused(make_target: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "moa", target_layers=1)
    with pytest.raises(IncompatibleError, match="cache cannot be read"):
        drafter.bind(replace(target.borrowed(), lm=None))
    with pytest.raises(RecipeError, match="target layer inference"):
        make_heads(target, "moa", target_layers=2)


def test_sizes_out_of_range_are_refused() -> None:
    for name in ("num_heads", "anchors"):
        with pytest.raises(RecipeError, match="too small"):
            MoaOptions(**{name: 0})


def test_under_the_staircase_a_draft_sees_no_token_before_it(
    make_target: Any, make_batch: Any
) -> None:
    """Other tokens there, with the same features: all drafts say the same, but without it."""
    target = make_target(num_layers=2, vocab=24)
    for progress, is_hidden in ((0.0, True), (0.5, False)):
        drafter = make_heads(target, "moa", num_heads=3, staircase=True)
        torch.nn.init.normal_(drafter.net.own.self_attn.o_proj.weight, std=0.3)
        batch = replace(make_batch(target, drafter, rows=2), progress=progress)
        anchor_BA = torch.tensor([[5, 14], [6, 15]])
        other_BS = batch.ids_BS.clone()
        other_BS[:, :5] = (other_BS[:, :5] + 1) % 24
        changed = replace(batch, ids_BS=other_BS)
        pairs = zip(
            drafter.unroll(batch, anchor_BA), drafter.unroll(changed, anchor_BA), strict=True
        )
        for one, two in pairs:
            assert torch.allclose(one[:, 5:7], two[:, 5:7], atol=1e-6) == is_hidden
    with torch.no_grad():
        assert not drafter.is_staircase(replace(batch, progress=0.0)), (
            "drafting sees the whole text"
        )


@torch.no_grad()
def test_a_draft_without_text_before_it_is_the_same_under_the_staircase(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "moa", num_heads=3, staircase=True)
    torch.nn.init.normal_(drafter.net.own.self_attn.o_proj.weight, std=0.3)
    batch = make_batch(target, drafter, rows=1)
    ids_1S, at_1S = batch.ids_BS[:, :6], torch.arange(6)[None]
    whole = drafter.net.own(
        drafter.embed(ids_1S), drafter.rope(at_1S), attending(Seen.text(at_1S * 0))
    )
    anchor_1A, at_1A = torch.tensor([[-1, -1]]), torch.tensor([[2, 4]])
    small = replace(batch, ids_BS=ids_1S, position_BS=at_1S)
    torch.testing.assert_close(drafter._since(anchor_1A, at_1A, small), whole[:, [2, 4]])
