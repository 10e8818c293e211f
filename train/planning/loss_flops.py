"""Floating-point operations of a block drafter's loss, by whether they grow with the vocabulary.

Traced on tensors without content, where every place of a mask is set: of a row that is no longer
than its anchors that is nearly so. The products over the vocabulary are counted in such a row, all
others in a whole one. They are matrix products; attention is left out, which is a small share.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from specctl.core.errors import SpecctlError
from specctl.recipes.schema import DrafterPart, TrainPart
from specctl.train.assemble import family_options, trainable_family
from specctl.train.features.capture import training_needs
from specctl.train.init.initial import completed
from specctl.train.planning.live_bytes import traced
from specctl.train.planning.step_bytes import (
    DATA_DEPENDENT,
    TracedStep,
    fake_drafter,
    served_target,
)
from specctl.train.planning.target_shape import TargetShape

FEW = 1009  # ids of a traced vocabulary: a number that no width is


@dataclass(frozen=True, slots=True)
class LossFlops:
    """Of the loss of one row with its gradient: `beside` the vocabulary, and for each id of it."""

    beside: int
    each_id: float

    def over(self, ids: int) -> float:
        """With so many ids."""
        return self.beside + ids * self.each_id


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products, apart where a side is FEW. Those over all of the target's ids are of what
    features hold already, and not counted."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.few = self.others = 0
        self._vocab_size = vocab_size

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "_overloadpacket", func))
        if count is not None:
            sides = {size for x in args if isinstance(x, Tensor) for size in x.shape}
            number = int(count(*args, **(kwargs or {}), out_val=out))
            if FEW in sides:
                self.few += number
            elif self._vocab_size not in sides:
                self.others += number
        return out


def loss_flops(part: DrafterPart, train: TrainPart, shape: TargetShape) -> LossFlops | None:
    """None where they depend on what tensors contain, and for a target whose embedding and head
    cannot stand alone."""
    family = trainable_family(part, train.joint)
    options = family_options(family, completed(part, shape.spec))
    anchored, length = options.anchors + options.num_heads + 1, train.seq_len
    try:
        few = _traced(part, train, shape, min(length, anchored)).few
        return LossFlops(_traced(part, train, shape, length).others, few / FEW)
    except (SpecctlError, *DATA_DEPENDENT):
        return None


def _traced(part: DrafterPart, train: TrainPart, shape: TargetShape, length: int) -> _Products:
    """Of one row of so many tokens."""
    products = _Products(shape.spec.vocab_size)
    with traced() as live:
        target = served_target(copy.deepcopy(shape.config), shape.spec, torch.float32)
        drafter = fake_drafter(part, train, shape.spec, FEW, is_gpu=False)
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
        step = TracedStep(live, target, drafter, False, lambda: None, training_needs(drafter))
        with products:
            step.peaks(1, length)
    return products
