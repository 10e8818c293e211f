"""Jakiro: experts that differ, and a contrast that drafts one token further than the mixture."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from specctl.core.batch import TrainBatch
from specctl.drafters.losses.align import aim
from specctl.drafters.losses.head_losses import LinearHead, LossOptions, head_loss
from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov


def steady(rows: int, seed: int) -> TrainBatch:
    """Rows in which every token has one successor."""
    generator = torch.Generator().manual_seed(seed)
    token_B, ids = torch.randint(24, (rows,), generator=generator), []
    for _ in range(16):
        ids.append(token_B)
        token_B = (token_B * 5 + 7) % 24
    ids_BS = torch.stack(ids, dim=1)
    at_BS = torch.arange(16).expand_as(ids_BS)
    return TrainBatch(ids_BS, at_BS >= 2, torch.zeros_like(ids_BS), at_BS)


def further(drafter: Any, batch: TrainBatch, branch: int) -> float:
    """How often that branch is right about the token two after the newest."""
    ready_RD = drafter.unroll(batch)[branch].ready_BSD.flatten(0, 1)
    head, how = LinearHead(drafter.head_weight()), LossOptions("ce")
    right, count = head_loss(ready_RD, head, aim(batch, 3), None, how).metrics["top1"]
    return float(right / count)


def test_the_contrast_drafts_the_second_token_which_the_mixture_cannot(
    make_model: Any, capture_batch: Any
) -> None:
    target = nearly_markov(make_model)
    drafter = make_heads(target, "jakiro", feature_weight=0.0, loss="ce", noise=0.0)
    fit(drafter, capture_batch(target, drafter, steady(16, 0)), 30)
    batch = capture_batch(target, drafter, steady(16, 1))
    mixture, contrast = (further(drafter, batch, branch) for branch in (0, 1))
    assert contrast > mixture + 0.3, (contrast, mixture)
    first, second = (expert(batch.taps[2]) for expert in drafter.module.layers[0].moe.experts)
    assert float(F.cosine_similarity(first, second, dim=-1).mean()) < 0.9


@torch.no_grad()
def test_the_last_token_of_a_draft_costs_no_pass(
    make_target: Any, drive: Any, monkeypatch: Any
) -> None:
    drafter = make_heads(make_target(), "jakiro", passes=3)
    calls = []
    through = type(drafter.module).through
    monkeypatch.setattr(
        type(drafter.module), "through", lambda *given: (calls.append(1), through(*given))[1]
    )
    one = drive(make_target(), drafter)
    assert len(one.chain_logits([5, 17, 3, 8, 21, 1], 3)) == 4
    assert len(calls) == 1 + 3  # the prompt, and three of the four tokens


@torch.no_grad()
def test_mixture_and_contrast_are_weighed_as_written(make_target: Any) -> None:
    moe = make_heads(make_target(), "jakiro").module.layers[0].moe
    for parameter in moe.parameters():
        parameter.normal_(std=0.3)
    x_ND = torch.randn(6, 32)
    scores = moe.router(x_ND)
    w, v = scores[:, :2].softmax(-1), scores[:, 2:].softmax(-1)
    outs = torch.stack([expert(x_ND) for expert in moe.experts], dim=1)
    at = torch.arange(6)
    a, b = w.argmax(-1), w.argmin(-1)
    mixture = w[at, a, None] * outs[at, a] + w[at, b, None] * outs[at, b]
    contrast = v[at, a, None] * outs[at, a] - v[at, b, None] * outs[at, b]
    torch.testing.assert_close(moe(x_ND), torch.cat([mixture, contrast], dim=-1))
