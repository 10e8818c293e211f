"""Low-rank adaptation of a drafter (LoRA, arXiv 2106.09685): W + alpha / r * B A, W frozen.

The additions are torch parametrizations of the weights, not peft's layers: peft wraps the modules
that it is given and adds B A x in their forward, but our drafters read weights themselves (fused
projections, packed copies, heads through F.linear), so that its additions would be skipped without
a word. A parametrized weight is W + B A wherever it is read, and so merging it is exact.
Letters: O outputs, I inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specctl.drafters.parts.base import Drafter
from specctl.recipes.errors import RecipeError
from specctl.recipes.schema import LoraPart
from specctl.train.optim import is_hidden_matrix

ADAPTER = "adapter.safetensors"


class LowRank(nn.Module):
    """A weight plus a product of rank R, which is zero at first."""

    def __init__(self, weight_OI: Tensor, part: LoraPart) -> None:
        super().__init__()
        O, I = weight_OI.shape  # noqa: E741
        rank = min(part.rank, O, I)
        self.scale = part.alpha / part.rank
        self.down_RI = nn.Parameter(weight_OI.new_empty(rank, I).normal_(std=I**-0.5))
        self.up_OR = nn.Parameter(weight_OI.new_zeros(O, rank))

    def forward(self, weight_OI: Tensor) -> Tensor:
        return weight_OI + self.scale * (self.up_OR @ self.down_RI)


def attach(drafter: Drafter, part: LoraPart, is_trained: bool = True) -> None:
    """Freeze a drafter and let only additions to its weights train: to those whose names end in one
    of `part.targets`, by default every matrix that maps one hidden width to another."""
    module = drafter.module
    assert module is not None, "a trained family has a module"
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
    chosen = {n: p for n, p in matrices.items() if _is_target(n, p, part, frozenset(sizes))}
    if not chosen:
        raise RecipeError(
            "no weight of the drafter has such a name",
            where="train.lora.targets",
            found=", ".join(part.targets or ()),
            expected="endings of " + ", ".join(n.removesuffix(".weight") for n in matrices),
            do="--set train.lora.targets=null adapts every hidden matrix",
        )
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for name, weight in chosen.items():
        owner, _, leaf = name.rpartition(".")
        addition = LowRank(weight, part)
        parametrize.register_parametrization(module.get_submodule(owner), leaf, addition)


def _is_target(name: str, weight: Tensor, part: LoraPart, sizes: frozenset[int]) -> bool:
    if part.targets is None:
        return is_hidden_matrix(weight, sizes)
    return name.removesuffix(".weight").endswith(part.targets)


def additions(drafter: Drafter) -> Iterator[tuple[str, LowRank]]:
    """Name of the weight and what is added to it."""
    assert drafter.module is not None
    for name, module in drafter.module.named_modules():
        if isinstance(module, LowRank):
            yield name.replace(".parametrizations.", ".").removesuffix(".0"), module


def save_adapter(drafter: Drafter, path: Path) -> None:
    """The additions alone: NAME.down [R, I] and NAME.up [O, R], the latter already scaled."""
    tensors: dict[str, Tensor] = {}
    for name, addition in additions(drafter):
        tensors[f"{name}.down"] = addition.down_RI.detach().cpu().contiguous()
        tensors[f"{name}.up"] = (addition.scale * addition.up_OR.detach()).cpu().contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def merge(drafter: Drafter) -> None:
    """Put the additions into the weights, which become ordinary parameters again."""
    assert drafter.module is not None
    for module in list(drafter.module.modules()):
        if parametrize.is_parametrized(module):
            for leaf in list(getattr(module, "parametrizations", {})):
                parametrize.remove_parametrizations(module, leaf, leave_parametrized=True)
