"""The frozen target spread over the processes: each keeps a slice of every layer's weights (FSDP2).

A layer is gathered when a batch comes to it and let go behind it, so that beside the drafter only
one layer of the target is whole at a time. Embedding, norm and head stay whole: drafters borrow
them. To decode, one process needs all layers; `whole_layers` gathers them for that while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.models.hf_lm import HfLM
from specctl.recipes.schema import Recipe
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target
from specctl.train.distributed.ranks import Ranks


def spread(recipe: Recipe, target: Target, ranks: Ranks) -> Target:
    """The same target with its layers spread over the ranks, where the recipe asks for that. The
    forward is transformers' own then, whichever it was before."""
    if not recipe.train.shard_target or ranks.size == 1:
        return target
    if recipe.data.features == "offline":
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


def spread_layers(target: Target) -> list[FSDPModule]:
    """The layers of a target that were spread."""
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
