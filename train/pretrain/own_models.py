"""Models that transformers does not have, as the training from nothing needs them: by the
`model_type` of the recipe, or by the type of a model that is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from specctl.core.errors import RecipeError
from specctl.core.storage.diffusion_kinds import diffusion_kind
from specctl.core.storage.grid_kinds import grid_kind
from specctl.diffusion.model import MaskedLM
from specctl.images.grid_net import GridNet
from specctl.train.pretrain.data import Ids
from specctl.train.pretrain.grids import (
    build_grid,
    check_grid,
    evaluate_grid,
    export_grid,
    grid_heads,
    grid_loss_sum,
)
from specctl.train.pretrain.masked import (
    build_masked,
    check_masked,
    evaluate_masked,
    export_masked,
    masked_heads,
    masked_loss_sum,
)
from specctl.train.pretrain.recipe import PretrainRecipe


@dataclass(frozen=True, slots=True)
class OwnModel:
    """`check` refuses a recipe before data are read; `loss_sum` is of rows of S + 1 ids; `heads`
    are matrices that learn as the embedding does; `evaluate` gives loss, accuracy and tokens."""

    check: Callable[[PretrainRecipe], None]
    build: Callable[[PretrainRecipe], nn.Module]
    loss_sum: Callable[..., Tensor]
    heads: Callable[[Any], list[Tensor]]
    evaluate: Callable[[Any, Ids, int, int], tuple[float, float, int]]
    export: Callable[[Path, Any, Any], None]


MASKED = OwnModel(
    check_masked, build_masked, masked_loss_sum, masked_heads, evaluate_masked, export_masked
)
GRID = OwnModel(check_grid, build_grid, grid_loss_sum, grid_heads, evaluate_grid, export_grid)


def check_plain(recipe: PretrainRecipe) -> None:
    """Refuse to compile such a model: its rows differ from batch to batch."""
    if recipe.train.compile:
        raise RecipeError(
            "this model is trained without compilation",
            where="train.compile",
            found=f"true, and model_type {recipe.model['model_type']}",
            expected="false",
            do="write compile: false",
        )


def own_kind(recipe: PretrainRecipe) -> OwnModel | None:
    """The kind that the recipe's `model` names; None for a model of transformers."""
    if diffusion_kind(recipe.model) is not None:
        return MASKED
    return None if grid_kind(recipe.model) is None else GRID


def own_model(model: Any) -> OwnModel | None:
    """The kind of a model; None for one of transformers."""
    if isinstance(model, MaskedLM):
        return MASKED
    return GRID if isinstance(model, GridNet) else None
