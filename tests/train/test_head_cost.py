"""What the draft head costs, of drafters that end most drafts early."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import pytest
import torch

from specctl.runtime.policies.chain import Chain
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.vocab.measure import measure_head_cost
from specctl_testing.runtime.pairs import disturbed


@pytest.mark.parametrize("every_length", [False, True])
def test_drafts_that_never_reach_their_length_have_a_price(
    make_target: Callable[..., Target], every_length: bool
) -> None:
    target = make_target(num_layers=2, vocab=64)
    drafter = disturbed(make_target, target, num_layers=2, vocab=64)
    policy = Chain(length=6, confidence=0.9)  # it is never so sure: one token a draft
    prompts = [HeldoutPrompt((1, 2, 3), "", "code")]
    cost = measure_head_cost(
        target, drafter, policy, torch.arange(64), prompts, rounds=4, every_length=every_length
    )
    assert all(isfinite(s) and s >= 0 for s in (cost.plain, cost.verify, cost.body, cost.head))
    assert cost.body + cost.head > 0
    assert all(isfinite(s) for s in cost.verify_at.values())
    assert isfinite(cost.speedup(1.5, 64))
