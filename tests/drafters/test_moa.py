"""Mixture of Attentions: the bound on what a draft sees, and attention along the depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.moa import MoaOptions
from specctl.drafters.nets.attention import Seen
from specctl.drafters.nets.blocks import attending
from specctl_testing.drafters.cross_cases import check_no_depth_sees_a_feature_behind_its_anchor
from specctl_testing.drafters.head_cases import make_heads


def test_no_depth_sees_a_feature_behind_its_anchor(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "moa", num_heads=3)
    check_no_depth_sees_a_feature_behind_its_anchor(drafter, make_batch(target, drafter))


@torch.no_grad()
def test_fresh_layer_attention_is_the_mean_of_the_depths(make_target: Any) -> None:
    drafter = make_heads(make_target(num_layers=4, vocab=24), "moa")
    states_XJD = torch.randn(3, 5, 4, 32)
    wanted = states_XJD.mean(2)
    torch.testing.assert_close(drafter.summary(states_XJD.flatten(2)), wanted)


@torch.no_grad()
def test_layer_attention_reads_depths_in_both_directions(make_target: Any) -> None:
    """With one depth changed, what is added to every other depth changes, too."""
    drafter = make_heads(make_target(num_layers=4, vocab=24), "moa")
    drafter.module.along.self_attn.o_proj.weight.normal_(std=0.2)
    states_JD = torch.randn(4, 32)
    for changed in (0, 3):
        other_JD = states_JD.clone()
        other_JD[changed] += torch.randn(32)
        given = [x.flatten()[None] for x in (states_JD, other_JD)]
        first, second = (drafter.summary(x)[0] for x in given)
        plain = (other_JD - states_JD).mean(0)
        assert not torch.allclose(second - first, plain, atol=1e-3)


@torch.no_grad()
def test_without_layer_attention_the_depths_have_no_order(make_target: Any) -> None:
    """What the target thought early and what it thought late are then one and the same."""
    target, states_JD = make_target(num_layers=4, vocab=24), torch.randn(4, 32)
    given = [x.flatten()[None] for x in (states_JD, states_JD.flip(0))]
    for layer_attention in (True, False):
        drafter = make_heads(target, "moa", layer_attention=layer_attention)
        if layer_attention:
            drafter.module.along.self_attn.o_proj.weight.normal_(std=0.2)
        first, second = (drafter.summary(x) for x in given)
        assert torch.allclose(first, second, atol=1e-4) != layer_attention


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
