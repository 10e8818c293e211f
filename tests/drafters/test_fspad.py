"""FSPAD: what sampling the feature and the split read-out do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov

FIELDS = {"feature_weight": 3.0, "noise": 0.0}


def trained(target: Any, make_batch: Any, **options: Any) -> dict[str, float]:
    drafter = make_heads(target, "fspad", **FIELDS, **options)
    fit(drafter, make_batch(target, drafter, rows=16, seq_len=40), 30)
    metrics = drafter.loss(make_batch(target, drafter, rows=16, seq_len=40, seed=1)).metrics
    return {name: float(total / count) for name, (total, count) in metrics.items()}


@pytest.mark.proof
def test_sampling_and_the_split_each_lift_acceptance(make_model: Any, make_batch: Any) -> None:
    target = nearly_markov(make_model)
    both = trained(target, make_batch)
    unsampled = trained(target, make_batch, feature_sampling=False)
    unsplit = trained(target, make_batch, split_readout=False)
    assert both["alpha"] > unsampled["alpha"] + 0.005, (both, unsampled)
    assert both["alpha"] > unsplit["alpha"] + 0.005, (both, unsplit)
    assert both["feature"] < 1.1 * unsplit["feature"], (both, unsplit)


@torch.no_grad()
def test_fresh_it_is_eagle(make_target: Any, make_batch: Any) -> None:
    target = make_target()
    fspad, eagle = (make_heads(target, name, noise=0.0) for name in ("fspad", "eagle"))
    fspad.module.load_state_dict(eagle.tensors(), strict=False)
    batch = make_batch(target, eagle)
    ours, theirs = fspad.unroll(batch)[0], eagle.unroll(batch)[0]
    torch.testing.assert_close(ours.ready_BSD, theirs.ready_BSD)
    torch.testing.assert_close(ours.state_BSD, theirs.state_BSD)


@torch.no_grad()
def test_the_logit_map_is_not_fed_back(make_target: Any, make_batch: Any) -> None:
    target = make_target()
    drafter = make_heads(target, "fspad", noise=0.0, ttt_steps=2)
    batch = make_batch(target, drafter)
    before = drafter.unroll(batch)
    drafter.module.logit_out.weight.normal_()
    after = drafter.unroll(batch)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old.state_BSD, new.state_BSD)
        assert not torch.allclose(old.ready_BSD, new.ready_BSD)
