"""S3D: which layers a draft runs, what is trained, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import RecipeError
from specctl.drafters.self_speculation.s3d import Skipping, SkippingOptions, skipped
from specctl.drafters.self_speculation.skip_layers import SkipLayers, SkipLayersOptions
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import decode


def made(target: Target, **options: Any) -> Skipping:
    torch.manual_seed(0)
    drafter = Skipping(SkippingOptions(**options), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def test_the_newest_token_is_read_without_the_span(make_target: Any, drive: Any) -> None:
    """Its place says what the same layers say token by token; the bridge adds to it."""
    target, text = make_target("llama", num_layers=4), [3, 1, 4, 1, 5, 9, 7]
    drafter = made(target, num_heads=3, skip_from=1, skip_layers=2)
    alone = SkipLayers(SkipLayersOptions(skip_attention=(1, 2), skip_mlp=(1, 2)), target.spec, None)
    alone.bind(target.borrowed())
    before_TV = drive(target, drafter).chain_logits(text, 6)
    torch.testing.assert_close(before_TV[0], drive(target, alone).chain_logits(text, 6)[0])
    assert drafter.module.bridge is not None
    with torch.no_grad():
        drafter.module.bridge.up.weight += 0.1
    after_TV = drive(target, drafter).chain_logits(text, 6)
    assert not torch.allclose(after_TV[0], before_TV[0], atol=1e-3)


def test_masks_and_bridge_learn_and_the_target_stays(
    make_target: Any, make_batch: Any, train_a_little: Any
) -> None:
    target = make_target(num_layers=3, vocab=24)
    before = [weight.clone() for weight in target.lm.module.parameters()]
    drafter = made(target, num_heads=2, rank=8)
    names = {"tokens", "bridge.down.weight", "bridge.up.weight"}
    assert set(drafter.trainable()) == names
    ahead = []
    for steps in (0, 40):
        if steps:
            train_a_little(target, drafter, steps)
        torch.manual_seed(1)
        metrics = drafter.loss(make_batch(target, drafter)).metrics
        ahead.append([float(metrics[name][0] / metrics[name][1]) for name in ("alpha", "alpha/1")])
    assert ahead[1][0] > ahead[0][0] + 0.02
    assert ahead[1][1] > ahead[0][1] + 0.02
    after = target.lm.module.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_several_tokens_are_drafted_and_the_text_is_the_targets(make_target: Any) -> None:
    target = make_target(num_layers=4)
    ran = decode(target, made(target, num_heads=3), policy="chain", length=3, slots=2, tokens=16)
    assert ran.answers == decode(target, None, tokens=16).answers
    assert max(outcome.tree.num_nodes for outcome in ran.outcomes) == 3


def test_half_of_the_layers_are_skipped_in_the_middle_and_never_the_first() -> None:
    assert [skipped(SkippingOptions(), n) for n in (2, 3, 8, 32)] == [
        range(1, 2), range(1, 2), range(2, 6), range(8, 24),
    ]  # fmt: skip
    for wrong in ({"skip_from": 0}, {"skip_layers": 8}, {"skip_from": 6, "skip_layers": 3}):
        with pytest.raises(RecipeError, match="first is among them"):
            skipped(SkippingOptions(**wrong), 8)
