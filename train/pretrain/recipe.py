"""The recipe of a pre-training run and its schedule: warm-up, stable, linear decay, in tokens."""

from __future__ import annotations

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


@dataclass(slots=True)
class PretrainProgress:
    """Where a run stands; written by `pretrain` alone. `decay_start` is a token count."""

    step: int = 0
    tokens: int = 0
    decay_start: int | None = None
    seconds: float = 0.0


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


def begin_decay_if_due(progress: PretrainProgress, recipe: TrainRecipe, asked: bool) -> bool:
    """Start the decay when the plan or somebody asks for it, once; True when it starts now."""
    is_planned = progress.tokens >= recipe.total_tokens - recipe.decay_tokens
    if progress.decay_start is not None or not (is_planned or asked):
        return False
    progress.decay_start = progress.tokens
    return True


def end_tokens(progress: PretrainProgress, recipe: TrainRecipe) -> int:
    """The token count at which the run ends, as far as it is known now."""
    if progress.decay_start is None:
        return recipe.total_tokens
    return progress.decay_start + recipe.decay_tokens


def is_finished(progress: PretrainProgress, recipe: TrainRecipe) -> bool:
    """True once the whole decay has been spent."""
    return progress.decay_start is not None and progress.tokens >= end_tokens(progress, recipe)


def learning_rate_factor(progress: PretrainProgress, recipe: TrainRecipe) -> float:
    """The factor on all learning rates for the next step, 0..1."""
    warm = min(1.0, (progress.tokens + recipe.tokens_per_step) / max(1, recipe.warmup_tokens))
    if progress.decay_start is None:
        return warm
    fallen = (progress.tokens - progress.decay_start) / max(1, recipe.decay_tokens)
    return warm * max(0.0, 1.0 - fallen)
