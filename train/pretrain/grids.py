"""Training of models that write pictures in an order of their own (neighbours, any-order): what
differs from that of a causal model. A row is the prompt, the codes in raster order, the end, which
they do not learn, and one id more, which is there for causal models.
Letters: B rows, L positions, S sequence.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import RecipeError
from specctl.images.grid_folder import build_net, save_grid
from specctl.images.grid_net import GridNet
from specctl.images.grid_shape import GridShape, shape_from
from specctl.train.pretrain.data import Ids, PretrainRows
from specctl.train.pretrain.pictures import FIRST_CODE
from specctl.train.pretrain.recipe import PretrainRecipe

HELDOUT_SEED = 4321  # of what an evaluation draws


def grid_shape(recipe: PretrainRecipe) -> GridShape:
    """The model's sizes: those of `model`, and those of its pictures."""
    images = recipe.images
    if images is None:
        raise RecipeError(
            "a model of pictures learns from pictures",
            where="images",
            found=f"model_type {recipe.model['model_type']} without the section",
            expected="the section images, as in recipes/tiny-neighbours.yaml",
            do="add it, or give another model_type",
        )
    sizes = {"grid": images.grid, "codes": images.codes, "first_code": FIRST_CODE}
    taken = {field.name for field in fields(GridShape)} - sizes.keys()
    if unknown := sorted(recipe.model.keys() - taken - {"max_position_embeddings"}):
        raise RecipeError(
            "a model of pictures has no such size",
            where=f"model.{unknown[0]}",
            found=repr(recipe.model[unknown[0]])[:60],
            expected="of " + ", ".join(sorted(taken)),
            do="leave it out; grid and codes are those of images",
        )
    return shape_from({**recipe.model, **sizes}, "model")


def check_grid(recipe: PretrainRecipe) -> None:
    """Refuse a model that cannot be, before pictures are made."""
    grid_shape(recipe)


def build_grid(recipe: PretrainRecipe) -> GridNet:
    """A fresh model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.data.seed)
        model = build_net(grid_shape(recipe))
        model.begin()
    return model


def grid_heads(model: GridNet) -> list[Tensor]:
    return model.heads()


def grid_loss(model: GridNet, rows_BS: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Loss in nats and whether it was ranked first, of every patch [B, L]. The same rows and seed
    give the same, so that a run that is resumed goes on as it would have."""
    random = torch.Generator().manual_seed((seed * 1_000_003 + int(rows_BS.sum())) % 2**63)
    logits_BLK, code_BL = model.training_logits(rows_BS[:, : 1 + model.shape.places], random)
    loss_BL = F.cross_entropy(logits_BLK.transpose(1, 2).float(), code_BL, reduction="none")
    return loss_BL, logits_BLK.argmax(-1) == code_BL


def grid_loss_sum(model: GridNet, rows_BS: Tensor, autocast: bool, seed: int) -> Tensor:
    """The loss summed over the patches. Digit and end are in the count of the rows and not here:
    the loss that is logged is a little lower than that of a patch."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return grid_loss(model, rows_BS, seed)[0].sum()


@torch.no_grad()
def evaluate_grid(
    model: GridNet, ids: Ids, seq_len: int, max_tokens: int
) -> tuple[float, float, int]:
    """Loss in nats a patch, the share of patches that are ranked first, and how many there were."""
    rows = PretrainRows(ids, seq_len, seed=0)
    num_rows = min(rows.num_rows, math.ceil(max_tokens / seq_len))
    loss, hits, count = 0.0, 0, 0
    for first in range(0, num_rows, 32):
        rows_BS = rows.take(first, min(32, num_rows - first))
        loss_BL, hit_BL = grid_loss(model, rows_BS, HELDOUT_SEED)
        loss, hits = loss + float(loss_BL.sum()), hits + int(hit_BL.sum())
        count += loss_BL.numel()
    return loss / count, hits / count, count


def export_grid(folder: Path, model: GridNet, tokenizer: Any) -> None:
    """A folder that `specctl generate` reads, once its codebook is there."""
    save_grid(folder, model, tokenizer)
