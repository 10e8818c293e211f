"""Pre-training of a masked diffusion model: what differs from that of a causal one.

The recipe's `model` is the config.json of LLaDA or Dream. With `diffusion.init` the weights begin
as those of a causal Llama with the same tokenizer, as Dream's begin as Qwen2.5's
(https://arxiv.org/abs/2508.15487): its causal mask goes, and predictions stay shifted by one.
Letters: B rows, S sequence.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.errors import RecipeError
from specctl.diffusion.folder import save_diffusion
from specctl.diffusion.model import MaskedLM
from specctl.diffusion.objective import masked_loss
from specctl.diffusion.shape import shape_from
from specctl.recipes.targets import resolve
from specctl.runtime.target.folders.checkpoint_folder import from_folder
from specctl.train.pretrain.data import Ids, PretrainRows, end_ids
from specctl.train.pretrain.recipe import PretrainRecipe

HELDOUT_SEED = 1234  # of the masks of an evaluation


def check_masked(recipe: PretrainRecipe) -> None:
    """Refuse a model that is not computed here, before the text is read."""
    shape_from(recipe.model, "model")


def build_masked(recipe: PretrainRecipe) -> MaskedLM:
    """A fresh model, or one that begins as the causal model of `diffusion.init`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.data.seed)
        model = MaskedLM(shape_from(recipe.model, "model"))
    if recipe.diffusion is not None and recipe.diffusion.init is not None:
        _begin_as(model, recipe.diffusion.init)
    return model


@torch.no_grad()
def _begin_as(model: MaskedLM, name: str) -> None:
    """Take the weights of a causal Llama; rows of the embedding that it lacks are its mean."""
    from transformers import AutoModelForCausalLM

    folder = resolve(name).path
    if folder is None:
        raise RecipeError(
            "'diffusion.init' names no model on this machine",
            found=name,
            expected="an alias or a folder of a Llama",
            do="write init: tiny, or leave it out",
        )
    causal = from_folder(AutoModelForCausalLM, folder, dtype=torch.float32)
    own, given = dict(model.named_parameters()), dict(causal.named_parameters())
    for key, parameter in own.items():
        if key.endswith(".bias") and key not in given:
            continue  # it begins at zero
        there = given.get(key)
        if there is None or there.shape[1:] != parameter.shape[1:] or len(there) > len(parameter):
            raise RecipeError(
                f"the weights of {name} do not fit the model of the recipe",
                where="diffusion.init",
                found=f"{key}: {'missing' if there is None else list(there.shape)}",
                expected=str(list(parameter.shape)),
                do="give the model the sizes of that target, or leave out diffusion.init",
            )
        parameter[: len(there)] = there
        parameter[len(there) :] = there.mean(0)


def masked_heads(model: MaskedLM) -> list[Tensor]:
    """None: its head counts as a matrix."""
    del model
    return []


def masked_loss_sum(model: Any, rows_BS: Tensor, autocast: bool, seed: int) -> Tensor:
    """The objective summed over the rows; the last id of a row is only there for causal models."""
    return masked_loss(model, rows_BS[:, :-1], seed, autocast).sum


@torch.no_grad()
def evaluate_masked(
    model: Any, ids: Ids, seq_len: int, max_tokens: int
) -> tuple[float, float, int]:
    """Bound of the loss in nats a token, the share of masked tokens that are ranked first (over
    all rates of masking alike), and the tokens that were read."""
    rows = PretrainRows(ids, seq_len, seed=0)
    num_rows = min(rows.num_rows, math.ceil(max_tokens / seq_len))
    loss, hits, masked, count = 0.0, 0, 0, 0
    for first in range(0, num_rows, 8):
        found = masked_loss(model, rows.take(first, min(8, num_rows - first))[:, :-1], HELDOUT_SEED)
        loss, count = loss + float(found.sum), count + found.count
        hits, masked = hits + int(found.hits), masked + found.masked
    return loss / count, hits / max(1, masked), count


def export_masked(folder: Path, model: MaskedLM, tokenizer: Any) -> None:
    """A folder that `specctl generate` reads."""
    save_diffusion(folder, model, tokenizer, end_ids(tokenizer))
