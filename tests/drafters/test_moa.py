"""Mixture of Attentions: the bound on what a draft sees, and attention along the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.moa import MoaOptions
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
