"""Optimizers and learning-rate schedules.

[Muon](muon.py) moves the hidden matrices, AdamW everything else: embeddings, heads over a
vocabulary, norms, vectors. Muon's update has the size of an AdamW update, so that one learning rate
serves both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specctl.core.errors import RecipeError
from specctl.recipes.schema import TrainPart
from specctl.train.distributed.pieces import is_piece, local, with_piece
from specctl.train.distributed.ranks import Ranks
from specctl.train.step.muon import Muon


def is_hidden_matrix(parameter: Tensor, vocab_sizes: frozenset[int]) -> bool:
    """True for a matrix that maps hidden width to hidden width: neither side is a vocabulary."""
    return parameter.ndim == 2 and not vocab_sizes.intersection(parameter.shape)


def is_attention(name: str) -> bool:
    """Whether a matrix belongs to an attention, by the names that layers of transformers have."""
    return re.search(r"attn|attention|\b[qkvo]_proj\b", name) is not None


def build_optimizers(
    trainable: Mapping[str, nn.Parameter],
    settings: TrainPart,
    vocab_sizes: frozenset[int],
    slow: Collection[str] = (),
    share: float = 1.0,
) -> dict[str, torch.optim.Optimizer]:
    """Optimizers over exactly the given parameters, by name: `muon` (if asked for) and `adamw`. The
    parameters named in `slow` learn at that share of the rate, by AdamW, and so do matrices over a
    vocabulary at the share `vocab_rate`; those of attention learn at `attention_rate` times it."""
    if not trainable:
        raise RecipeError(
            "nothing to train: the drafter has no trainable parameter",
            do="choose a trainable family; training-free families are used as they are",
            where="drafter.family",
        )
    fast = {n: p for n, p in trainable.items() if n not in slow}
    hidden = {n: p for n, p in fast.items() if is_hidden_matrix(p, vocab_sizes)}
    looking = [p for name, p in hidden.items() if is_attention(name)]
    matrices: list[nn.Parameter] = []
    if settings.optimizer == "muon":
        matrices = [p for name, p in hidden.items() if not is_attention(name)]
    behind = [trainable[name] for name in slow]
    chosen = {id(p) for p in (*looking, *matrices, *behind)}
    rest = [p for p in trainable.values() if id(p) not in chosen]
    wide = list[nn.Parameter]()  # with a rate of their own
    if settings.vocab_rate != 1.0:
        wide = [p for p in rest if p.ndim == 2 and not is_hidden_matrix(p, vocab_sizes)]
        rest = [p for p in rest if p.ndim != 2 or is_hidden_matrix(p, vocab_sizes)]
    rate, decay = settings.learning_rate, settings.weight_decay
    found: dict[str, torch.optim.Optimizer] = {}
    attention = (looking, settings.attention_rate)
    by_adamw = [(rest, 1.0), (wide, settings.vocab_rate), (behind, share)]
    if settings.optimizer == "muon":
        if groups := _groups([(matrices, 1.0), attention]):
            found["muon"] = Muon(groups, lr=rate, weight_decay=decay, momentum=settings.momentum)
    else:
        by_adamw.append(attention)
    if groups := _groups(by_adamw):
        found["adamw"] = torch.optim.AdamW(
            groups,
            lr=rate,
            betas=(0.9, 0.95),
            weight_decay=decay,
            fused=all(_is_fused_for(p) for params, _ in by_adamw for p in params),
        )
        found["adamw"].register_step_post_hook(_counted)
    return found


def _groups(parts: Sequence[tuple[list[nn.Parameter], float]]) -> list[dict[str, Any]]:
    """Groups of parameters, each with its share of the rate."""
    return [{"params": params, "share": share} for params, share in parts if params]


def _is_fused_for(parameter: Tensor) -> bool:
    """PyTorch's fused update reads the numbers as they lie, beside a gradient that lies flat."""
    return parameter.device.type in ("cpu", "cuda") and parameter.is_contiguous()


def _counted(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A fused update does not count as a write of its parameters, by which copies of them are known
    to be old."""
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch.autograd.graph.increment_version(moved)


def learning_rate(step: int, settings: TrainPart) -> float:
    """The learning rate of update number `step` (0 is the first): a pure function of the step."""
    return settings.learning_rate * _factor(step, settings)


def _factor(step: int, settings: TrainPart) -> float:
    steps = settings.steps
    warm_steps = round(settings.warmup * steps)
    if step < warm_steps:
        return (step + 1) / (warm_steps + 1)
    left = (steps - step) / max(1, steps - warm_steps)
    if settings.schedule == "linear":
        return left
    if settings.schedule == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * left))
    assert settings.schedule == "wsd", settings.schedule
    decay_steps = max(1, round(settings.decay * steps))
    return min(1.0, (steps - step) / decay_steps)


class Schedule(Protocol):
    """How many updates a run has, as far as it is known now, and the learning rate of each."""

    @property
    def steps(self) -> int: ...

    def rate(self, step: int) -> float: ...


@dataclass(frozen=True, slots=True)
class RecipeSchedule:
    """The schedule of a recipe, whose number of steps is fixed. A run that goes on with more data
    `began` this schedule at that step: it warms up and decays over the steps after it."""

    settings: TrainPart
    began: int = 0

    @property
    def steps(self) -> int:
        return self.settings.steps

    def rate(self, step: int) -> float:
        later = self.settings.model_copy(update={"steps": self.steps - self.began})
        return learning_rate(step - self.began, later)


def set_learning_rate(optimizers: Mapping[str, torch.optim.Optimizer], rate: float) -> None:
    """Of every group of parameters, by the share at which it learns."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)


class Gradient:
    """The gradient of all trainable parameters as one flat vector; every `.grad` is a view of it.

    So one all-reduce sums it over ranks, one norm guards the update, one product makes it a mean.
    Of sharded parameters it holds this rank's pieces, which FSDP has summed in the backward pass.
    One writer: the loop.
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter], ranks: Ranks | None = None) -> None:
        parameters = list(trainable.values())
        self.ranks = ranks or Ranks()
        self.is_sharded = is_piece(parameters[0])
        kinds = {p.dtype for p in parameters}
        assert len(kinds) == 1, f"trainable parameters of several dtypes: {kinds}"
        total = sum(local(p).numel() for p in parameters)
        self.flat_N = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        at = 0
        for parameter in parameters:
            part = local(parameter.detach())
            parameter.grad = with_piece(
                self.flat_N[at : at + part.numel()].view_as(part), parameter
            )
            at += part.numel()

    def zero(self) -> None:
        self.flat_N.zero_()

    def sum(self) -> None:
        """Sum over all ranks."""
        if not self.is_sharded:
            self.ranks.sum_(self.flat_N)

    def norm(self, count: float) -> float:
        """Of the mean gradient: the sum over its count."""
        norm = self.flat_N.norm()
        if self.is_sharded:
            norm = self.ranks.sum_(norm.square()).sqrt()
        return float(norm) / count

    def divide(self, count: float, norm: float, limit: float | None = None) -> None:
        """The sum becomes the mean, whose norm that is, shortened to `limit` where it is longer."""
        share = 1.0 if limit is None or not norm > limit else limit / norm
        self.flat_N.mul_(share / count)
