"""EAGLE: what the token beside the feature is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import fit, make_heads, nearly_markov


def alpha(target: Target, make_batch: Any, name: str, step: int = 0, **options: Any) -> float:
    """Acceptance on unseen text after 40 steps of training."""
    drafter = make_heads(target, name, feature_weight=1.0, **options)
    fit(drafter, make_batch(target, drafter, rows=16, seq_len=40), 40)
    metrics = drafter.loss(make_batch(target, drafter, rows=16, seq_len=40, seed=1)).metrics
    right, count = metrics["alpha" if step == 0 else f"alpha/{step}"]
    return float(right / count)


@pytest.mark.proof
def test_without_the_token_that_was_drawn_acceptance_collapses(
    make_model: Any, make_batch: Any
) -> None:
    target = nearly_markov(make_model)
    whole = alpha(target, make_batch, "eagle")
    blind = alpha(target, make_batch, "eagle", read_tokens=False)
    assert whole > blind + 0.05, (whole, blind)


def test_noise_is_added_while_training_only(make_target: Any, make_batch: Any, drive: Any) -> None:
    target = make_target()
    drafter = make_heads(target, "eagle", noise=0.5)
    batch = make_batch(target, drafter)
    first, second = (drafter.unroll(batch)[0].ready_BSD for _ in range(2))
    assert not torch.equal(first, second)
    served = [drive(target, drafter).chain_logits([5, 17, 3, 8], 3) for _ in range(2)]
    torch.testing.assert_close(*served, rtol=0.0, atol=0.0)


@torch.no_grad()
def test_noise_falls_with_the_length_of_a_document(make_target: Any, make_batch: Any) -> None:
    """U(-0.1, 0.1) 512 / S of EAGLE's trainer, never louder than that of S = 512."""
    target = make_target(num_layers=2, vocab=24)
    for length, share in ((10, 10 / 22), (None, 1.0)):
        drafter = make_heads(target, "eagle", noise=0.5, noise_length=length)
        document_BS = torch.where(torch.arange(32) < 10, 0, 1).expand(8, -1)  # 10 and 22 tokens
        batch = make_batch(target, drafter, rows=8, seq_len=32)
        batch = replace(batch, document_BS=document_BS)
        off_BSD = (drafter.noisy(batch) - batch.taps[drafter.tap]).abs()
        assert float(off_BSD[:, :10].amax()) == pytest.approx(0.5, rel=0.02)
        assert float(off_BSD[:, 10:].amax()) == pytest.approx(0.5 * share, rel=0.02)


def test_tensor_names_are_those_of_the_public_format(make_target: Any) -> None:
    names = set(make_heads(make_target(), "eagle").tensors())
    attention = {f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}
    mlp = {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norm = {"layers.0.post_attention_layernorm.weight"}
    assert names == attention | mlp | norm | {"fc.weight", "fc.bias"}
