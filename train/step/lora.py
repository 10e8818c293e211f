"""Low-rank adaptation of weights (LoRA, arXiv 2106.09685): W + alpha / r * B A, W frozen.

The additions are torch parametrizations of the weights, not peft's layers: peft wraps the modules
that it is given and adds B A x in their forward, but FastLlama reads weights itself (fused
projections, packed copies), so that its additions are skipped without a word. Measured over 25
families (benchmarks/lora.py): in five (small-lm, sorted, rasd, staged, superposed) none of what
peft adds reaches the loss, in falcon not what is added to its LSTM, in the other 19 all of it, and
a parametrized step takes 1.11 to 1.21 times as long as peft's. One mechanism serves all: a
parametrized weight is W + B A wherever it is read, and so merging it is exact. What is written is
peft's format. The additions are float32 even where W is not: the sum is rounded to the weight's own
dtype at once, so that what is learned with is what is merged. Letters: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.recipes.low_rank import LoraPart
from specctl.runtime.target.variants.adapter import CONFIG, TENSORS, plain_config
from specctl.train.step.optim import is_hidden_matrix

ADAPTER = "adapter"  # folder of a run
_PREFIX = "base_model.model."  # peft's names are those of the module that it wraps, behind this


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
            yield f".{name}".replace(".parametrizations.", ".").removesuffix(".0")[1:], part


def unnameable(module: nn.Module) -> list[str]:
    """The weights with additions that are no linear layer's, for which peft has no name."""
    owners = ((name, name.rpartition(".")) for name, _ in additions(module))
    return [
        name
        for name, (owner, _, leaf) in owners
        if leaf != "weight" or not isinstance(module.get_submodule(owner), nn.Linear)
    ]


def save_adapter(module: nn.Module, folder: Path, part: LowRankPart, base: str | None) -> None:
    """The additions alone, in peft's format: adapter_model.safetensors with lora_A [R, I] and
    lora_B [O, R] of each linear layer, adapter_config.json with `base` as the model's name.

    Engines read one r and one alpha: where a matrix is too small for the rank, its factors are
    filled up with zeros, which leaves the product as it is."""
    left = unnameable(module)
    assert not left, f"no linear layers: {left}"
    tensors: dict[str, Tensor] = {}
    names = []
    for name, addition in additions(module):
        names.append(name.removesuffix(".weight"))
        more = part.rank - addition.down_RI.shape[0]
        down_RI = F.pad(addition.down_RI.detach(), (0, 0, 0, more))
        up_OR = F.pad(addition.up_OR.detach(), (0, more))
        tensors[f"{_PREFIX}{names[-1]}.lora_A.weight"] = down_RI.cpu().contiguous()
        tensors[f"{_PREFIX}{names[-1]}.lora_B.weight"] = up_OR.cpu().contiguous()
    config = plain_config(part.rank, part.alpha, base, _endings(module, names))
    folder.mkdir(exist_ok=True)
    partial = folder / (TENSORS + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / TENSORS)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def _endings(module: nn.Module, names: list[str]) -> list[str]:
    """The last parts of the names where no other linear layer has one of them, as people and
    engines write target_modules; else the whole names."""
    endings = sorted({name.rpartition(".")[2] for name in names})
    linear = (n for n, m in module.named_modules() if isinstance(m, nn.Linear))
    meant = {name for name in linear if name.rpartition(".")[2] in endings}
    return endings if meant == set(names) else sorted(names)


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
