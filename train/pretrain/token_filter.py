"""Training of Learn2PD's filter (https://arxiv.org/abs/2509.25188) for a masked diffusion model.

The model decodes prompts of the training text by the plain schedule, one token a pass. Every pass
gives, for each masked position of its block, the confidence of the guess and whether the guess is
the token with which decoding ended. The filter learns the latter from the former by binary
cross-entropy. The model itself is not changed: OUT/export is a copy of its folder with the filter.
Letters: B rows, W window.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import FileError, RecipeError
from specctl.core.storage.model_folder import CONFIG
from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.engine import denoise_with
from specctl.diffusion.folder import DiffusionTarget, load_diffusion
from specctl.diffusion.settings import DenoiseSettings
from specctl.diffusion.unmask.base import BlockStep
from specctl.diffusion.unmask.learned import FILTER, TokenFilter, block_confidences
from specctl.diffusion.unmask.static import StaticUnmask
from specctl.recipes.section import Positive, Section
from specctl.train.data.sources.corpus import training_texts
from specctl.train.pretrain.own_section import folder_of, own_section

EXPORT = "export"
HELDOUT_SHARE = 0.25  # of the prompts
SURE = 0.9  # the threshold at which precision and recall are reported


class FilterRecipe(Section):
    """What decides a filter: the folder of its model, the decodings, the network, its training."""

    target: str
    block: Positive
    hidden: Positive
    prompts: Positive
    prompt_tokens: Positive
    new_tokens: Positive
    text_bytes: Positive
    epochs: Positive
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class FilterReport:
    """On held-out decodings: the cross-entropy in nats, and at a threshold of .9 the share of kept
    guesses that were final (precision) and of final guesses that were kept (recall). `passes`:
    how many were learned from."""

    path: Path
    loss: float
    precision: float
    recall: float
    passes: int


@dataclass(frozen=True, slots=True)
class FilterRows:
    """Passes as rows: confidences, which positions were masked, which guesses were final."""

    confidence_BW: Tensor
    masked_BW: Tensor
    final_BW: Tensor


def filter_recipe(path: Path) -> FilterRecipe | None:
    """The recipe of a filter in a YAML file; None where the file is a recipe of a model."""
    return own_section(path, "filter", FilterRecipe, "tiny-learn2pd")


class RecordingUnmask(StaticUnmask):
    """The plain schedule, every pass of which is kept."""

    def __init__(self) -> None:
        self.passes: list[tuple[CanvasGuess, BlockStep]] = []

    def keep(self, guess: CanvasGuess, step: BlockStep) -> Tensor:
        self.passes.append((guess, step))
        return super().keep(guess, step)


def decoded_rows(
    target: DiffusionTarget, prompts: Sequence[Sequence[int]], block: int, new_tokens: int
) -> FilterRows:
    """What every pass of greedy plain decoding shows of its block."""
    rows = list[tuple[Tensor, Tensor, Tensor]]()
    for prompt in prompts:
        record = RecordingUnmask()
        made = denoise_with(
            target,
            prompt,
            DenoiseSettings(block=block),
            record,
            max_new_tokens=new_tokens,
            ignore_eos=True,
        )
        final_L = torch.tensor([*prompt, *made.token_ids])
        for guess, step in record.passes:
            masked_W, final_W = torch.zeros(block), torch.zeros(block)
            inside = guess.within(step.first, step.last)
            place_Q, token_Q = guess.place_Q[inside], guess.token_Q[inside]
            masked_W[place_Q - step.first] = 1.0
            final_W[place_Q - step.first] = (final_L[place_Q] == token_Q).float()
            read_W = block_confidences(guess, step.first, step.last, block)
            rows.append((read_W, masked_W, final_W))
    return FilterRows(*(torch.stack(column) for column in zip(*rows, strict=True)))


def filter_loss(model: TokenFilter, rows: FilterRows) -> Tensor:
    """Binary cross-entropy a masked position, in nats."""
    loss_BW = F.binary_cross_entropy_with_logits(
        model(rows.confidence_BW), rows.final_BW, reduction="none"
    )
    return (loss_BW * rows.masked_BW).sum() / rows.masked_BW.sum()


def fit_filter(model: TokenFilter, rows: FilterRows, epochs: int, learning_rate: float) -> None:
    """AdamW over all rows at once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        filter_loss(model, rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _check_export(export: Path) -> None:
    """Refuse a folder that holds a model without a filter: a run of its own, which the copy would
    overwrite."""
    if (export / CONFIG).is_file() and not (export / FILTER).is_file():
        raise FileError(
            "the output folder holds another model",
            where=str(export),
            found=f"{CONFIG}, and no {FILTER}",
            expected="a new folder, or one that tiny-learn2pd wrote",
            do="give another folder: --out runs/tiny-learn2pd",
        )


def train_filter(recipe: FilterRecipe, out: Path) -> FilterReport:
    """Decode, fit, and write OUT/export: the model's folder with the filter."""
    folder = folder_of(recipe.target, "filter.target", out / EXPORT)
    _check_export(out / EXPORT)
    target = load_diffusion(folder)
    texts = training_texts(recipe.text_bytes, recipe.seed)[: recipe.prompts]
    prompts = [target.encode(text)[: recipe.prompt_tokens] for text in texts]
    prompts = [prompt for prompt in prompts if prompt]
    if len(prompts) < 2:
        raise RecipeError(
            "there are too few texts to learn from and to hold out",
            where="filter.prompts",
            found=f"{len(prompts)} prompts",
            expected="at least two",
            do="raise filter.prompts or filter.text_bytes",
        )
    held = max(1, int(len(prompts) * HELDOUT_SHARE))
    shape = recipe.block, recipe.new_tokens
    learned, heldout = (
        decoded_rows(target, part, *shape) for part in (prompts[held:], prompts[:held])
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = TokenFilter(recipe.block, recipe.hidden)
    fit_filter(model, learned, recipe.epochs, recipe.learning_rate)
    shutil.copytree(folder, out / EXPORT, dirs_exist_ok=True)
    model.save(out / EXPORT)
    with torch.no_grad():
        kept_BW = (torch.sigmoid(model(heldout.confidence_BW)) > SURE) & heldout.masked_BW.bool()
        right, final = float((kept_BW * heldout.final_BW).sum()), float(heldout.final_BW.sum())
        return FilterReport(
            out / EXPORT,
            float(filter_loss(model, heldout)),
            right / max(1, int(kept_BW.sum())),
            right / max(1.0, final),
            len(learned.final_BW),
        )
