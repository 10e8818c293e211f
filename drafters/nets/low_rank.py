"""Low-rank additions of a drafter's own to matrices of the target, on the rows that it drafts.

What `core/forward/row_additions.py` reads: A and B of some linear layers of some of the target's
layers, the target's own matrices being left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from torch import nn

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.forward.row_additions import ATTENTION, MLP, Factors, Place, linear_sizes
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.drafters.option_checks import OneOf

LinearName = Annotated[str, OneOf(ATTENTION + MLP)]
OF_PACKED = (
    "a CPU reads the matrices of this GGUF file as they are packed, to which nothing can be added: "
    "draft with --dtype float32, or it is refused"
)


class LowRankPair(nn.Module):
    """A [rank, inputs] and B [outputs, rank] of one matrix; B begins as zero."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, inputs).normal_(std=inputs**-0.5))
        self.up = nn.Parameter(torch.zeros(outputs, rank))


def pairs_of(spec: ModelSpec, names: Sequence[str], rank: int, layers: int) -> nn.ModuleList:
    """A pair for each of the linear layers named, of so many layers."""
    sizes = linear_sizes(spec)
    return nn.ModuleList(
        nn.ModuleDict({name: LowRankPair(*sizes[name], rank) for name in names})
        for _ in range(layers)
    )


def factors_of(layers: nn.ModuleList, scale: float, first: int = 0) -> dict[Place, Factors]:
    """What is added where; the first of these layers is the target's layer `first`."""
    return {
        (first + index, name): Factors(pair.down, pair.up, scale)
        for index, layer in enumerate(layers)
        for name, pair in layer.items()  # type: ignore[operator]
    }


def check_names(names: Sequence[str]) -> None:
    """The option `targets` of a drafter that adds."""
    if not names or len({*names}) < len(names):
        raise RecipeError(
            "additions are made to some linear layers, each named once",
            where="drafter.options.targets",
            found=str(list(names)),
            expected=", ".join(ATTENTION + MLP),
            do="leave targets out: all of them",
        )


def check_places(lm: LanguageModel, factors: Mapping[Place, Factors], without: str) -> None:
    """Raise IncompatibleError where the target has no place for one of these. `without`: what does
    without any."""
    for (layer, name), one in factors.items():
        shape = one.up.shape[0], one.down.shape[1]
        found = lm.linear_at(layer, name)
        if found != shape:
            raise IncompatibleError(
                "this target has no place for additions on some rows alone",
                found=f"layer {layer}: {name} {'none' if found is None else list(found)}",
                expected=f"a linear layer {list(shape)} of that layer alone, not packed in few "
                "bits",
                do=_instead(lm, sorted({layer for layer, _ in factors}), without),
            )


def _instead(lm: LanguageModel, layers: Sequence[int], without: str) -> str:
    """What helps where some of the linear layers are not there."""
    if getattr(lm, "bits", None) is not None:  # auto packs a GGUF file's on a CPU
        return "load the target with --dtype float32"
    there = [
        name
        for name, shape in linear_sizes(lm.spec).items()
        if all(lm.linear_at(layer, name) == shape for layer in layers)
    ]
    if not there:
        return without
    named = f"--set drafter.options.targets='[{', '.join(there)}]'"
    return f"name those that it has: {named}, or {without}"
