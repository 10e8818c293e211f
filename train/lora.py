"""Low-rank adaptation of weights (LoRA, arXiv 2106.09685): W + alpha / r * B A, W frozen.

The additions are torch parametrizations of the weights, not peft's layers: peft wraps the modules
that it is given and adds B A x in their forward, but our models read weights themselves (fused
projections, packed copies, heads through F.linear), so that its additions would be skipped without
a word. A parametrized weight is W + B A wherever it is read, and so merging it is exact. The
additions are float32 even where W is not: the sum is rounded to the weight's own dtype at once, so
that what is learned with is what is merged. Letters: O outputs, I inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.recipes.low_rank import LoraPart
from specctl.train.optim import is_hidden_matrix

ADAPTER = "adapter.safetensors"


class LowRankPart(Protocol):
    """What a recipe says of additions, to whatever they are made."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def targets(self) -> tuple[str, ...] | None: ...


class LowRank(nn.Module):
    """A weight plus a product of rank R, which is zero at first."""

    def __init__(self, weight_OI: Tensor, part: LowRankPart) -> None:
        super().__init__()
        O, I = weight_OI.shape  # noqa: E741
        rank = min(part.rank, O, I)
        self.scale = part.alpha / part.rank
        like = weight_OI.new_empty(0, dtype=torch.float32)
        self.down_RI = nn.Parameter(like.new_empty(rank, I).normal_(std=I**-0.5))
        self.up_OR = nn.Parameter(like.new_zeros(O, rank))

    def forward(self, weight_OI: Tensor) -> Tensor:
        wide = torch.promote_types(weight_OI.dtype, torch.float32)
        whole_OI = weight_OI.to(wide) + self.scale * (self.up_OR @ self.down_RI)
        return whole_OI.to(weight_OI.dtype)


def attach(drafter: Drafter, part: LoraPart, is_trained: bool = True) -> None:
    """Freeze a drafter and let only additions to its weights train: to those whose names end in one
    of `part.targets`, by default every matrix that maps one hidden width to another."""
    assert drafter.module is not None, "a trained family has a module"
    if not is_trained:
        raise RecipeError(
            "low-rank additions to weights that were never trained",
            where="train.lora",
            found="drafter.init: null",
            expected="a drafter to adapt",
            do="specctl adapt --draft FOLDER, or --set train.lora=null",
        )
    sizes = {drafter.spec.vocab_size} | ({drafter.vocab.size} if drafter.vocab else set())
    matrices = {n: p for n, p in drafter.trainable().items() if p.ndim == 2}
    if part.targets is None:
        matrices = {n: p for n, p in matrices.items() if is_hidden_matrix(p, frozenset(sizes))}
    add(drafter.module, matrices, part, "the drafter", "train.lora.targets")


def add(
    module: nn.Module,
    matrices: Mapping[str, nn.Parameter],
    part: LowRankPart,
    whose: str,
    where: str,
) -> None:
    """Freeze a module and add to those of the `matrices` whose names end in `part.targets`."""
    endings = ("",) if part.targets is None else part.targets
    chosen = {n: p for n, p in matrices.items() if n.removesuffix(".weight").endswith(endings)}
    if not chosen:
        raise RecipeError(
            f"no weight of {whose} has such a name",
            where=where,
            found=", ".join(part.targets or ()),
            expected="endings of " + ", ".join(n.removesuffix(".weight") for n in matrices),
            do=f"--set {where}=null adapts every hidden matrix",
        )
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for name, weight in chosen.items():
        owner, _, leaf = name.rpartition(".")
        addition = LowRank(weight, part)
        parametrize.register_parametrization(module.get_submodule(owner), leaf, addition)


def additions(module: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Name of the weight and what is added to it."""
    for name, part in module.named_modules():
        if isinstance(part, LowRank):
            yield name.replace(".parametrizations.", ".").removesuffix(".0"), part


def save_adapter(module: nn.Module, path: Path) -> None:
    """The additions alone: NAME.down [R, I] and NAME.up [O, R], the latter already scaled."""
    tensors: dict[str, Tensor] = {}
    for name, addition in additions(module):
        tensors[f"{name}.down"] = addition.down_RI.detach().cpu().contiguous()
        tensors[f"{name}.up"] = (addition.scale * addition.up_OR.detach()).cpu().contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def merge(module: nn.Module) -> None:
    """Put the additions into the weights, which become ordinary parameters again. The tensors that
    were added to stay as they are: another module may share them."""
    for owner in list(module.modules()):
        if parametrize.is_parametrized(owner):
            for leaf in list(getattr(owner, "parametrizations", {})):
                weight = getattr(owner, leaf).detach()
                parametrize.remove_parametrizations(owner, leaf, leave_parametrized=False)
                setattr(owner, leaf, nn.Parameter(weight, requires_grad=False))
    module.to(next(module.parameters()).device)  # whoever keeps packed copies drops them
