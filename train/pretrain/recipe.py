"""The recipe of a pre-training run and its schedule: warm-up, stable, linear decay, in tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from specctl.core.errors import FileError, RecipeError, nearest

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """Text: bytes for the tokenizer, bytes to train on (None: all), seed of every order."""

    tokenizer_bytes: int
    limit_bytes: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """Batch, schedule and optimizers; all learning rates follow the same schedule.

    The decay may use longer rows (`decay_seq_len`), fewer of them, the same tokens a step.
    """

    seq_len: int
    decay_seq_len: int
    micro_batch: int
    accumulate: int
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


@dataclass(frozen=True, slots=True)
class ReportRecipe:
    """When to log, evaluate, save and export."""

    log_tokens: int
    eval_every_tokens: int
    eval_tokens: int
    final_eval_tokens: int
    save_every_seconds: float
    export_every_seconds: float


@dataclass(frozen=True, slots=True)
class PretrainRecipe:
    """All that decides a run; `model` is handed to `LlamaConfig` as it is."""

    model: dict[str, Any]
    data: DataRecipe
    train: TrainRecipe
    report: ReportRecipe


def _section(path: Path, raw: Mapping[str, Any], name: str, kind: type[Section]) -> Section:
    given = raw[name]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise RecipeError(
                f"unknown key '{name}.{key}'",
                expected=f"one of {nearest(key, known)}",
                do="correct the key or take it out",
                where=str(path),
            )
    missing = [key for key in known if key not in given]
    if missing:
        raise RecipeError(
            f"section '{name}' lacks {', '.join(missing)}",
            do="add the keys; recipes/tiny-target.yaml has them all",
            where=str(path),
        )
    return kind(**given)


def _check_rows(path: Path, train: TrainRecipe) -> None:
    if train.micro_batch * train.seq_len % train.decay_seq_len:
        raise RecipeError(
            "train.decay_seq_len does not divide the tokens of a micro-batch",
            found=f"{train.decay_seq_len}",
            expected=f"a divisor of {train.micro_batch} x {train.seq_len}",
            do="change train.decay_seq_len or train.micro_batch",
            where=str(path),
        )


def load_pretrain_recipe(path: Path) -> PretrainRecipe:
    """The recipe in a YAML file; every key must be there and known."""
    if not path.exists():
        raise FileError(f"no recipe at {path}", do="name a YAML file")
    raw = yaml.safe_load(path.read_text())
    sections = {"model", "data", "train", "report"}
    if not isinstance(raw, dict) or set(raw) != sections:
        found = ", ".join(sorted(raw)) if isinstance(raw, dict) else type(raw).__name__
        raise RecipeError(
            "not a pre-training recipe",
            found=found,
            expected=", ".join(sorted(sections)),
            do="start from recipes/tiny-target.yaml",
            where=str(path),
        )
    train = _section(path, raw, "train", TrainRecipe)
    _check_rows(path, train)
    return PretrainRecipe(
        model=raw["model"],
        data=_section(path, raw, "data", DataRecipe),
        train=train,
        report=_section(path, raw, "report", ReportRecipe),
    )


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
