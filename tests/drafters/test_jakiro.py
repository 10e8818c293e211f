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


@torch.no_grad()
def test_decoupled_siblings_are_each_experts_own_best(make_target: Any) -> None:
    """Of one mixture the best child is a token that neither expert would have drafted."""
    found, head_KD = {}, torch.zeros(4, 32)
    head_KD[0, 0] = head_KD[1, 1] = 1.0
    head_KD[2, :2] = 0.9  # between both
    for decoupled in (False, True):
        net = make_heads(make_target(), "jakiro", decoupled=decoupled).module
        first_1D, second_1D = (20.0 * torch.eye(32)[i][None] for i in range(2))
        out = [(first_1D + second_1D) / 2, first_1D * 0, first_1D, second_1D, torch.zeros(1, 2)]
        out_1O = torch.cat(out if decoupled else out[:2], dim=-1)
        logits_1K = net.logits(net.ready(out_1O), lambda x: F.linear(x, head_KD))
        found[decoupled] = set(logits_1K.topk(2).indices[0].tolist())
        assert torch.equal(net.fed_back(out_1O), out[0])
    assert 2 in found[False]
    assert found[True] == {0, 1}


@torch.no_grad()
def test_decoupled_children_are_drawn_from_both_experts(make_target: Any) -> None:
    """q = w_1 softmax(W (h + X_1)) + w_2 softmax(W (h + X_2)), in training as in serving."""
    drafter = make_heads(make_target(), "jakiro", decoupled=True)
    layer = drafter.module.layers[0]
    for parameter in layer.moe.parameters():
        parameter.normal_(std=0.3)
    h_1TD = torch.randn(1, 6, 32)
    x_1TD = layer.post_attention_layernorm(h_1TD)
    weight_1T2 = layer.moe.router(x_1TD)[..., :2].softmax(-1)
    each = [F.linear(h_1TD + expert(x_1TD), drafter.head_weight()) for expert in layer.moe.experts]
    q = sum(weight_1T2[..., i, None] * one.softmax(-1) for i, one in enumerate(each))
    ready = drafter.module.ready(layer.finish(h_1TD))
    torch.testing.assert_close(drafter.head()(ready).exp(), q, rtol=1e-4, atol=1e-6)
