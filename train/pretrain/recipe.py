"""The recipe of a pre-training run and its schedule: warm-up, stable, linear decay, in tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from specctl.core.errors import FileError, RecipeError, nearest
from specctl.core.storage.bounded_read import read_text
from specctl.recipes.files import parse_yaml
from specctl.recipes.section import Positive, Section


class DataRecipe(Section):
    """Text: bytes for the tokenizer, bytes to train on (None: all), seed of every order.
    `tokenizer`: the target whose tokenizer is taken; None: one is made of `tokenizer_bytes`."""

    tokenizer_bytes: int
    limit_bytes: int | None
    seed: int
    tokenizer: str | None = None


class TrainRecipe(Section):
    """Batch, schedule and optimizers; all learning rates follow the same schedule.

    The decay may use longer rows (`decay_seq_len`), fewer of them, the same tokens a step.
    """

    seq_len: Positive
    decay_seq_len: Positive
    micro_batch: Positive
    accumulate: Positive
    total_tokens: int
    decay_tokens: int
    warmup_tokens: int
    matrix_lr: float
    embedding_lr: float
    norm_lr: float
    weight_decay: float
    clip: float
    autocast: bool
    compile: bool
    num_threads: int

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.micro_batch * self.accumulate

    @model_validator(mode="after")
    def _rows_divide_a_batch(self) -> Self:
        if self.micro_batch * self.seq_len % self.decay_seq_len:
            raise ValueError("decay_seq_len does not divide the tokens of a micro-batch")
        return self


class ReportRecipe(Section):
    """When to log, evaluate, save and export."""

    log_tokens: int
    eval_every_tokens: int
    eval_tokens: int
    final_eval_tokens: int
    save_every_seconds: float
    export_every_seconds: float


class DiffusionRecipe(Section):
    """How a masked diffusion model is trained. `init`: the causal target as which it begins."""

    init: str | None = None


class ImageRecipe(Section):
    """Pictures in the place of text: `pictures` rendered digits to learn from and `heldout` others,
    each of `grid` x `grid` patches with `side` pixels a side, out of a codebook of `codes`."""

    pictures: Positive
    heldout: Positive
    grid: Positive
    side: Positive
    codes: Positive


class PretrainRecipe(Section):
    """All that decides a run; `model` is handed to the configuration of its `model_type` (a Llama
    where it names none) as it is. `diffusion`: of a masked diffusion model alone; `images`: of a
    target whose tokens are pictures."""

    model: dict[str, Any]
    data: DataRecipe
    train: TrainRecipe
    report: ReportRecipe
    diffusion: DiffusionRecipe | None = None
    images: ImageRecipe | None = None


def load_pretrain_recipe(path: Path) -> PretrainRecipe:
    """The recipe in a YAML file; every key must be there and known."""
    if not path.exists():
        raise FileError(f"no recipe at {path}", do="name a YAML file")
    try:
        return PretrainRecipe.model_validate(parse_yaml(read_text(path), str(path)))
    except ValidationError as error:
        problem = error.errors()[0]
        name, expected = ".".join(map(str, problem["loc"])), problem["msg"]
        if problem["type"] == "extra_forbidden":
            section, _, key = name.rpartition(".")
            owner = PretrainRecipe.model_fields[section].annotation if section else PretrainRecipe
            expected = "one of " + nearest(key, getattr(owner, "model_fields", ()))
        raise RecipeError(
            f"'{name}' of the pretraining recipe is not valid",
            where=str(path),
            found=repr(problem["input"])[:120],
            expected=expected.removeprefix("Value error, "),
            do="correct it; recipes/tiny-target.yaml has every key",
        ) from error


class TokenSchedule:
    """The rate of every step as a factor on all learning rates, and where the run ends, in tokens.
    The decay begins where the recipe has it, or at once where somebody asks. One writer: the loop,
    through the text that asks before every step."""

    def __init__(self, recipe: TrainRecipe) -> None:
        self.recipe = recipe
        self.decay_start: int | None = None  # tokens

    @property
    def steps(self) -> int:
        """All steps of the run, as far as is known now: the first that ends the decay or is
        beyond it is the last."""
        each, start = self.recipe.tokens_per_step, self.decay_start
        if start is None:
            start = max(0, math.ceil(self._planned / each)) * each
        return math.ceil((start + self.recipe.decay_tokens) / each)

    @property
    def _planned(self) -> int:
        return self.recipe.total_tokens - self.recipe.decay_tokens

    def begin_decay_if_due(self, step: int, asked: bool) -> None:
        """Start the decay before this step when the plan or somebody asks for it, once."""
        tokens = step * self.recipe.tokens_per_step
        if self.decay_start is None and (asked or tokens >= self._planned):
            self.decay_start = tokens

    def rate(self, step: int) -> float:
        """The factor for that step, 0..1."""
        recipe, tokens = self.recipe, step * self.recipe.tokens_per_step
        warm = min(1.0, (tokens + recipe.tokens_per_step) / max(1, recipe.warmup_tokens))
        if self.decay_start is None:
            return warm
        fallen = (tokens - self.decay_start) / max(1, recipe.decay_tokens)
        return warm * max(0.0, 1.0 - fallen)
