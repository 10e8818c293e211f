"""How well heads on a small random target do after the same few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.runtime.target.target import Target
from specctl_testing.models import LOGIT_STD

MakeBatch = Callable[..., TrainBatch]


def nearly_markov(make_model: Callable[..., Any], vocab: int = 24) -> Target:
    """A random target whose next token follows from the last one more than from all others: what a
    head can know of its token's predecessor decides how well it does."""
    model = make_model(num_layers=2, vocab=vocab)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.25)
    return Target.from_model(model)


def attending_target(make_model: Callable[..., Any]) -> Target:
    """A target whose next token hangs on what its last layer attends to."""
    model = make_model(num_layers=2, vocab=24, seed=1)
    with torch.no_grad():
        for layer, scale in zip(model.model.layers, (3.0, 4.0), strict=True):
            layer.self_attn.o_proj.weight.mul_(scale)
        model.lm_head.weight.mul_(LOGIT_STD / model(torch.arange(24)[None]).logits.std())
    return Target.from_model(model)


def make_heads(target: Target, name: str, vocab: VocabMap | None = None, **options: Any) -> Any:
    """A fresh drafter of that family, bound to the target."""
    torch.manual_seed(1)
    found = family(name)
    drafter = found.build(found.options(**options), target.spec, vocab)
    drafter.bind(target.borrowed())
    return drafter


def shaken_heads(target: Target, name: str, vocab: VocabMap | None = None, **options: Any) -> Any:
    """Such a drafter in which nothing is zero and nothing the identity."""
    drafter = make_heads(target, name, vocab, **options)
    with torch.no_grad():
        for parameter in drafter.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return drafter


def fit(drafter: Drafter, batch: TrainBatch, steps: int, rate: float = 1e-2) -> None:
    """So many Adam steps on one batch."""
    optimizer = torch.optim.Adam(drafter.trainable().values(), lr=rate)
    for _ in range(steps):
        out = drafter.loss(batch)
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()


def train(
    target: Target, drafter: Drafter, make_batch: MakeBatch, steps: int = 60, rows: int = 24
) -> None:
    """`fit` to `rows` times 48 tokens of random text."""
    fit(drafter, make_batch(target, drafter, rows=rows, seq_len=48), steps)


@torch.no_grad()
def alphas(target: Target, drafter: Any, make_batch: MakeBatch) -> list[float]:
    """Mean acceptance of every head on text that it has not seen."""
    metrics = drafter.loss(make_batch(target, drafter, rows=24, seq_len=48, seed=1)).metrics
    names = ["alpha", *(f"alpha/{i}" for i in range(1, drafter.options.num_heads))]
    return [float(metrics[name][0] / metrics[name][1]) for name in names]


def learned(
    target: Target, name: str, make_batch: MakeBatch, steps: int = 40, **options: Any
) -> list[float]:
    """`alphas` after `steps` steps of the loss against the target's distribution."""
    drafter = make_heads(target, name, num_heads=3, loss="kl", **options)
    train(target, drafter, make_batch, steps)
    return alphas(target, drafter, make_batch)
