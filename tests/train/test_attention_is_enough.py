"""Kangaroo's adapter (arXiv 2404.18911) is an attention alone: what it has to make up for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.drafters import family
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture

VOCAB, STEPS = 48, 200


def batch_of(target: Target, mlp: bool, seed: int, rows: int = 8) -> TrainBatch:
    source = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, VOCAB, (rows, 24), generator=source)
    batch = TrainBatch(
        ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), torch.zeros_like(ids_BS),
        torch.arange(24).expand(rows, 24),
    )  # fmt: skip
    found = family("kangaroo")
    return capture(target, batch, found.build(found.options(mlp=mlp), target.spec, None).needs())


def alpha(target: Target, mlp: bool, steps: int) -> float:
    """Acceptance on unseen text after so many steps."""
    torch.manual_seed(1)
    found = family("kangaroo")
    drafter = found.build(found.options(mlp=mlp), target.spec, None)
    drafter.bind(target.borrowed())
    optimizer = torch.optim.Adam(drafter.trainable().values(), lr=1e-2)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1.0 - step / steps)
        out = drafter.loss(batch_of(target, mlp, 100 + step))
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()
    with torch.no_grad():
        total, count = drafter.loss(batch_of(target, mlp, 7, rows=64)).metrics["alpha"]
    return float(total / count)


@pytest.mark.proof
@pytest.mark.parametrize("left", ["attention", "mlp"])
def test_an_attention_is_enough_where_the_layers_left_out_attend(
    left: str, make_target: Callable[..., Target]
) -> None:
    """The target's third layer, which the drafter leaves out, is an attention, or an MLP: that one
    is missed."""
    target = make_target(num_layers=3, vocab=VOCAB)
    model: Any = target.lm.module
    layer = model.model.layers[2]
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(0.0 if left == "attention" else 4.0)
        layer.self_attn.o_proj.weight.mul_(0.0 if left == "mlp" else 4.0)
    start, alone, both = (
        alpha(target, *how) for how in ((False, 0), (False, STEPS), (True, STEPS))
    )
    assert alone > start + 0.1
    if left == "attention":
        assert both < alone + 0.03
    else:
        assert both > alone + 0.12
