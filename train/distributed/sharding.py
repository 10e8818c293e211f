"""Fully sharded training (FSDP2): every process keeps a slice of each weight, gradient and state.

The whole loss of a drafter is one FSDP unit: its weights are gathered before the loss, its gradient
is summed and cut after the backward pass. So a family need not know of it, whichever of its modules
it calls and how. Per process and number trained this leaves 16 / processes bytes of float32 weight,
gradient and AdamW state, plus 8 while a batch is being learned.

The frozen target may be sharded, too: a layer is gathered when a batch comes to it and let go after
it, so that beside the drafter only one layer of the target is whole at a time. Embedding, norm and
head stay whole: drafters borrow them. To decode, one process needs all layers; `whole_layers`
gathers them for that while.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Drafter, DraftState, Needs, Space
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.language_model import Borrowed
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.read_only import ReadingLM
from specctl.recipes.schema import DataPart, TrainPart
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target
from specctl.train.distributed.pieces import gathered, like_parameter
from specctl.train.distributed.ranks import Ranks


class _Loss(nn.Module):
    """A drafter's loss as a module's forward, which is where FSDP gathers weights."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        assert drafter.module is not None
        self.module, self._drafter = drafter.module, drafter

    def forward(self, batch: TrainBatch) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        out = self._drafter.loss(batch)
        moved = [p for p in self.module.parameters() if p.requires_grad]
        # A process without a token to predict must take part in the exchange of gradients, too.
        touch = torch.stack([p.reshape(-1)[:1].sum() for p in moved]).sum()
        return out.sum + 0.0 * touch, out.count, out.metrics


class Sharded(Drafter):
    """A drafter whose weights are spread over the processes while it is trained. `layers` of the
    target that are spread as well are gathered together with it, for who decodes needs both."""

    def __init__(self, drafter: Drafter, ranks: Ranks, layers: Sequence[FSDPModule] = ()) -> None:
        super().__init__(drafter.options, drafter.spec, drafter.vocab)
        self.family, self.lossless = drafter.family, drafter.lossless  # type: ignore[misc]
        self.splits_rows = drafter.splits_rows
        self._whole, self._ranks, self._layers = drafter, ranks, layers
        self._own = copy.deepcopy(drafter, _shared(drafter))
        self.module = self._own.module
        self._loss = _Loss(self._own)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        unit = fully_shard(self._loss, mesh=mesh)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # sums; the loop divides once by the global count
        unit.set_force_sum_reduction_for_comms(True)
        drafter.to(torch.device("cpu"))

    def needs(self) -> Needs:
        return self._own.needs()

    def open(self, space: Space) -> DraftState:
        raise AssertionError("a sharded drafter drafts only inside `whole()`")

    def loss(self, batch: TrainBatch) -> LossOut:
        total, count, metrics = self._loss(batch)
        return LossOut(total, count, metrics)

    def tensors(self) -> dict[str, Tensor]:
        """Whole, on the first process; every process must call this."""
        return gathered(self._own.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        pieces = self._own.tensors()
        self._own.load_tensors(
            {n: like_parameter(t, pieces[n]) if n in pieces else t for n, t in tensors.items()}
        )

    @contextmanager
    def whole(self) -> Iterator[Drafter]:
        """The drafter in one piece, in eval mode, on the first process."""
        tensors = self.tensors()
        if self._ranks.is_main:
            self._whole.to(self._ranks.device)
            self._whole.load_tensors(tensors)
            assert self._whole.module is not None
            self._whole.module.eval()
        try:
            with whole_layers(self._layers):
                yield self._whole
        finally:
            self._whole.to(torch.device("cpu"))


def _shared(drafter: Drafter) -> dict[int, Any]:
    """A memo for deepcopy: what a drafter borrows from the target is shared, never copied."""
    held = (getattr(drafter, "__dict__", {})).values()
    return {id(value): value for value in held if isinstance(value, (Tensor, Borrowed))}


def shard_target(train: TrainPart, data: DataPart, target: Target, ranks: Ranks) -> Target:
    """The same target with its layers spread over the ranks, where the recipe asks for that. The
    forward is transformers' own then, whichever it was before."""
    if not train.shard_target or ranks.size == 1:
        return target
    if data.features == "offline":
        raise RecipeError(
            "processes that keep features on disk do not read rows in step",
            found="train.shard_target: true, data.features: offline",
            expected="one of the two",
            do="--set train.shard_target=false",
            where="train.shard_target",
        )
    model = as_transformers(target.lm)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for layer in _layers(model, target.spec.num_layers):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if isinstance(target.lm, ReadingLM):  # documents one by one: states run past masks
        found = target.lm.reason or "layers that are spread over the processes"
        return replace(target, lm=ReadingLM(model, target.eos_ids, found))
    return replace(target, lm=HfLM(model, target.eos_ids, target.lm.kv_layers))


def _layers(model: Any, count: int) -> nn.ModuleList:
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise IncompatibleError(
        f"the layers of {type(model).__name__} cannot be found",
        expected=f"a list of {count} layers",
        do="--set train.shard_target=false",
    )


def sharded_layers(target: Target) -> list[FSDPModule]:
    """The layers of a target that were sharded."""
    return [part for part in target.lm.module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def whole_layers(layers: Sequence[FSDPModule]) -> Iterator[None]:
    """All layers whole on every process, until the block ends; every process must enter."""
    for layer in layers:
        layer.set_reshard_after_forward(False)
        layer.unshard()
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True)
            layer.reshard()
