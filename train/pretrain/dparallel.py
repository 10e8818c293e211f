"""dParallel (https://arxiv.org/abs/2509.26488): a masked diffusion model learns to be certain of
more of its tokens at once.

It writes texts by its plain schedule, and is trained on them by certainty-forcing distillation
(diffusion/certainty.py), whole or by low-rank additions, which are merged. OUT/export is a model of
its own, which decodes by a threshold of entropy (`diffusion.unmask=entropy:0.5`); the model that it
began as is not changed. Of published training, answers that are wrong are not left out: texts of
code have no right answer to compare with.
Letters: B rows, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from specctl.core.errors import DivergedError, FileError
from specctl.core.storage.files import write_json
from specctl.core.storage.model_folder import CONFIG
from specctl.diffusion.certainty import block_rows, certainty_loss
from specctl.diffusion.folder import DiffusionTarget, load_diffusion, save_diffusion
from specctl.diffusion.model import MaskedLM
from specctl.recipes.low_rank import LoraPart
from specctl.recipes.section import Fraction, Positive, Section, SeedNumber
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.placement.device import choose_device
from specctl.train.data.sources.corpus import training_texts
from specctl.train.pretrain.own_section import folder_of, own_section
from specctl.train.pretrain.trajectories import Trajectories, prompt_windows, written
from specctl.train.step.lora import add, merge
from specctl.train.step.optim import is_hidden_matrix

EXPORT, REPORT = "export", "dparallel.json"
HELDOUT_SHARE = 0.125  # of the prompts
HELDOUT_SEED = 1234  # of the masks of an evaluation
HELDOUT_MASKS = 4  # how often a held-out text is masked


class DParallelRecipe(Section):
    """What decides a distillation: the folder of the model, the texts that it writes, the loss, and
    its training. `temperature`: of the texts; 0: the likeliest tokens, as published. `lora` null:
    all weights learn."""

    target: str
    device: str
    block: Positive
    prompts: Annotated[int, Field(ge=8, le=10**9)]
    prompt_tokens: Positive
    new_tokens: Positive
    temperature: Annotated[float, Field(ge=0.0, le=100.0)]
    text_bytes: Positive
    mask_rate: Annotated[float, Field(gt=0.0, lt=1.0)]
    entropy_temperature: Annotated[float, Field(gt=0.0, le=100.0)]
    entropy_weight: Annotated[float, Field(ge=0.0, le=1000.0)]
    epochs: Positive
    batch: Positive
    accumulate: Positive
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)]
    weight_decay: Fraction
    clip: Annotated[float, Field(gt=0.0)]
    autocast: bool
    lora: LoraPart | None
    seed: SeedNumber


@dataclass(frozen=True, slots=True)
class CertaintyFigures:
    """On held-out texts of the model, of masked positions of the block: the cross-entropy with what
    it wrote, the entropy of those whose likeliest token is what it wrote, both in nats and means
    over rows that have any, and the share of these positions."""

    cross_entropy: float
    entropy: float
    right: float


@dataclass(frozen=True, slots=True)
class DParallelReport:
    """The folder, held-out figures before and after, and the texts that were learned from."""

    path: Path
    before: CertaintyFigures
    after: CertaintyFigures
    texts: int


def dparallel_recipe(path: Path) -> DParallelRecipe | None:
    """The recipe of a distillation in a YAML file; None where the file is another recipe."""
    return own_section(path, "dparallel", DParallelRecipe, "tiny-dparallel")


def certainty_step(
    model: MaskedLM, ids_BS: Tensor, start: int, recipe: DParallelRecipe, random: torch.Generator
) -> float:
    """Add the gradient of the loss of these texts, masked twice, divided by `recipe.accumulate`;
    the loss."""
    total = 0.0
    halves = block_rows(
        ids_BS, start, recipe.block, model.diffusion.mask_id, random, recipe.mask_rate
    )
    for rows in halves:
        found = certainty_loss(model, rows, ids_BS, recipe.entropy_temperature, recipe.autocast)
        loss = found.consistency + recipe.entropy_weight * found.certainty
        (loss / recipe.accumulate).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def distill(
    model: MaskedLM, texts: Trajectories, recipe: DParallelRecipe, reporter: Reporter
) -> list[float]:
    """AdamW at a constant rate on whatever of the model requires a gradient; the mean loss of every
    epoch. Raises DivergedError where loss or gradient is not finite."""
    device = model.model.embed_tokens.weight.device
    random = torch.Generator().manual_seed(recipe.seed)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    count, losses = len(texts.ids_BS), list[float]()
    steps = math.ceil(count / (recipe.batch * recipe.accumulate)) * recipe.epochs
    with reporter.task("distill", steps, "steps") as advance:
        for _ in range(recipe.epochs):
            seen = list[float]()
            for group in _groups(count, recipe, random):
                optimizer.zero_grad(set_to_none=True)
                for row_B in group:
                    ids_BS = texts.part(row_B).to(device)
                    seen.append(certainty_step(model, ids_BS, texts.start, recipe, random))
                norm = float(nn.utils.clip_grad_norm_(learned, recipe.clip))
                _check_finite(math.fsum(seen[-len(group) :]), norm, recipe.learning_rate)
                optimizer.step()
                advance(1, f"loss {seen[-1]:.3f}")
            losses.append(math.fsum(seen) / len(seen))
    return losses


def _check_finite(loss: float, norm: float, rate: float) -> None:
    """Refuse a step that would make every weight NaN."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise DivergedError(
            "loss or gradient is not finite; nothing was written",
            where="dparallel.learning_rate",
            found=f"loss {loss}, gradient norm {norm}",
            expected="finite numbers",
            do=f"lower the rate: learning_rate: {rate / 3:.2g}",
        )


def _groups(count: int, recipe: DParallelRecipe, random: torch.Generator) -> Iterator[list[Tensor]]:
    """The rows of every step, as batches of which the gradients add up."""
    order_B = torch.randperm(count, generator=random)
    batches = [order_B[at : at + recipe.batch] for at in range(0, count, recipe.batch)]
    for first in range(0, len(batches), recipe.accumulate):
        yield list(batches[first : first + recipe.accumulate])


@torch.no_grad()
def certainty_figures(
    model: MaskedLM, texts: Trajectories, recipe: DParallelRecipe
) -> CertaintyFigures:
    """Of the model on these texts; the same masks for the same texts."""
    device = model.model.embed_tokens.weight.device
    random = torch.Generator().manual_seed(HELDOUT_SEED)
    loss = entropy = 0.0
    right = masked = rows_masked = rows_right = 0
    for _ in range(HELDOUT_MASKS):
        for first in range(0, len(texts.ids_BS), recipe.batch):
            ids_BS = texts.part(slice(first, first + recipe.batch)).to(device)
            for rows in block_rows(
                ids_BS, texts.start, recipe.block, model.diffusion.mask_id, random, recipe.mask_rate
            ):
                found = certainty_loss(model, rows, ids_BS, 1.0, recipe.autocast)
                loss += float(found.consistency) * len(ids_BS)
                entropy += float(found.certainty) * len(ids_BS)
                right, masked = right + found.right, masked + found.masked
                rows_masked += found.rows_masked
                rows_right += found.rows_right
    return CertaintyFigures(
        loss / max(1, rows_masked), entropy / max(1, rows_right), right / max(1, masked)
    )


def _made_to_learn(model: MaskedLM, recipe: DParallelRecipe) -> None:
    """All weights, or additions to the hidden matrices."""
    model.requires_grad_(True)
    if recipe.lora is not None:
        vocabulary = frozenset({model.diffusion.vocab_size})
        matrices = {n: p for n, p in model.named_parameters() if is_hidden_matrix(p, vocabulary)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            add(model, matrices, recipe.lora, "the model", "dparallel.lora.targets")


def _decoded(
    target: DiffusionTarget, recipe: DParallelRecipe, reporter: Reporter
) -> tuple[Trajectories, Trajectories]:
    """Texts of the model: to learn from, and held out."""
    texts = training_texts(recipe.text_bytes, recipe.seed)
    prompts = prompt_windows(
        target.encode, texts, recipe.prompts, recipe.prompt_tokens, recipe.seed
    )
    parts = list[Tensor]()
    with reporter.task("decode", len(prompts), "prompts") as advance:
        for first in range(0, len(prompts), recipe.batch):
            some = prompts[first : first + recipe.batch]
            made = written(
                target, some, recipe.block, recipe.new_tokens,
                temperature=recipe.temperature, seed=recipe.seed + first,
            )  # fmt: skip
            parts.append(made.ids_BS)
            advance(len(some))
    whole_BS, held = torch.cat(parts), int(recipe.prompts * HELDOUT_SHARE)
    start = recipe.prompt_tokens
    return Trajectories(whole_BS[held:], start), Trajectories(whole_BS[:held], start)


def train_dparallel(
    recipe: DParallelRecipe, out: Path, reporter: Reporter | None = None
) -> DParallelReport:
    """Decode, distill, and write OUT/export and OUT/dparallel.json with the figures."""
    reporter = reporter or SilentReporter()
    folder = folder_of(recipe.target, "dparallel.target", out / EXPORT)
    _check_export(out)
    target = load_diffusion(folder, choose_device(recipe.device))
    learned, heldout = _decoded(target, recipe, reporter)
    model = target.model
    before = certainty_figures(model, heldout, recipe)
    _made_to_learn(model, recipe)
    losses = distill(model, learned, recipe, reporter)
    merge(model)
    after = certainty_figures(model, heldout, recipe)
    save_diffusion(out / EXPORT, model, target.tokenizer, list(target.eos_ids))
    report = DParallelReport(out / EXPORT, before, after, len(learned.ids_BS))
    figures = {"before": asdict(before), "after": asdict(after), "texts": report.texts}
    write_json(out / REPORT, {"recipe": recipe.model_dump(), "losses": losses, **figures})
    return report


def _check_export(out: Path) -> None:
    """Refuse a folder that holds another model: a run of its own, which would be overwritten."""
    if (out / EXPORT / CONFIG).is_file() and not (out / REPORT).is_file():
        raise FileError(
            "the output folder holds another model",
            where=str(out / EXPORT),
            found=f"{CONFIG}, and no {REPORT}",
            expected="a new folder, or one that tiny-dparallel wrote",
            do="give another folder: --out runs/tiny-dparallel",
        )
