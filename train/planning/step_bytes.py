"""Bytes of a training step on one process, by tracing the step itself on fake tensors.

The target's forward, the family's loss, its backward pass and the update run as they are, at a few
short lengths, on tensors without content (see `live_bytes`). Whatever the code keeps is counted,
and stays counted when the code changes. Between the lengths the peak of each phase is a polynomial,

    constant + rows * (per_row + per_token * S + per_square * S^2)

which is solved for from four points and then asked for the recipe's own rows and length S. Nothing
is allocated: a target of 70B parameters takes seconds.
Letters: B rows, D hidden width, S sequence, V target vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from transformers import AutoModelForCausalLM

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter, Needs
from specctl.core.errors import IncompatibleError
from specctl.core.kv_cache import KVShape
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.head_losses import fitting_chunk
from specctl.models.fast_llama import fast_llama_from_hf
from specctl.models.hf_lm import HfLM
from specctl.models.hf_spec import refuse_stateful
from specctl.models.read_only import ReadingLM
from specctl.recipes.schema import Recipe
from specctl.runtime.target.device import DTYPES
from specctl.runtime.target.target import Target
from specctl.train.assemble import family_options, trainable_family
from specctl.train.features.capture import capture
from specctl.train.init.initial import completed
from specctl.train.lora import attach
from specctl.train.optim import Gradient, build_optimizers
from specctl.train.planning.live_bytes import LiveBytes, traced

READING, FEATURES = "the target reads", "its features"
LONGEST = 1536  # positions of a traced row; a longer row is reckoned from shorter ones
SHARES = (0.5, 0.75)  # of it, for two more points: long enough to fill a slice of logits
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
ANY_KV = (KVShape(1, 1, 1, 1),)  # a fake model is not tried; nothing is decoded with it


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes as a function of rows and their length."""

    constant: float
    per_row: float
    per_token: float
    per_square: float

    @classmethod
    def through(cls, lengths: Sequence[int], one_row: Sequence[int], two_rows: int) -> Growth:
        """Through the bytes of one row at three lengths, and of two rows at the first of them."""
        matrix = torch.tensor([[1.0, s, s * s] for s in lengths], dtype=torch.float64)
        found = torch.linalg.solve(matrix, torch.tensor(one_row, dtype=torch.float64))
        base, token, square = found.tolist()
        first = lengths[0]
        row = two_rows - one_row[0] - token * first - square * first * first
        return cls(base - row, row, token, square)

    def at(self, rows: int, seq_len: int) -> int:
        grown = self.per_row + self.per_token * seq_len + self.per_square * seq_len * seq_len
        return max(0, round(self.constant + rows * grown))


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Of one process that holds everything whole: weights of the target, by whether they are those
    of layers, which may be spread; the drafter's weights, gradient and optimizer state; and how the
    peak of each phase of a step grows above them."""

    layers: int
    beside_layers: int
    largest_layer: int
    weights: int
    gradient: int
    optimizer: int
    phases: Mapping[str, Growth]
    untraced: str = ""  # why the phases are not known: an operator whose result depends on content

    @property
    def target(self) -> int:
        return self.layers + self.beside_layers

    def batch(self, rows: int, seq_len: int, parts: int = 1) -> int:
        """Peak of a step over so many rows above what is always there; 0 where it is untraced.
        `parts`: processes that compute one row together, each with the features of all of it."""
        if parts == 1 or not self.phases:
            return max((phase.at(rows, seq_len) for phase in self.phases.values()), default=0)
        own, features = -(-seq_len // parts), self.phases[FEATURES]
        more = features.at(rows, seq_len) - features.at(rows, own)
        whole = (READING, FEATURES)
        return max(
            phase.at(rows, seq_len) if name in whole else phase.at(rows, own) + more
            for name, phase in self.phases.items()
        )


def step_bytes(recipe: Recipe, config: Any, spec: ModelSpec, dtype: str, is_gpu: bool) -> StepBytes:
    """The bytes of a recipe's step for a target of that transformers configuration, held in that
    dtype. `is_gpu`: with the slices of logits that a GPU gets."""
    told = json.dumps(config.to_diff_dict(), sort_keys=True, default=str)
    drafter = recipe.drafter.model_dump_json()
    size = recipe.vocab.size
    kept = min(size, spec.vocab_size) if isinstance(size, int) else None
    train = recipe.train
    how = (train.precision, train.optimizer, train.seq_len, train.lora, train.sequence_parallel > 1)
    return _Known(recipe, config, spec).bytes((told, drafter, kept, how, dtype, is_gpu))


class _Known:
    """A question to the cache: what is asked, hashed and compared by its key alone."""

    def __init__(self, recipe: Recipe, config: Any, spec: ModelSpec) -> None:
        self.recipe, self.config, self.spec = recipe, config, spec
        self.key: tuple[Any, ...] = ()

    def bytes(self, key: tuple[Any, ...]) -> StepBytes:
        self.key = key
        return _asked(self)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.key == self.key


@lru_cache(maxsize=16)
def _asked(asked: _Known) -> StepBytes:
    *_, kept, _, dtype, is_gpu = asked.key
    recipe, train = asked.recipe, asked.recipe.train
    longest = min(train.seq_len, LONGEST)
    lengths = [max(8, round(longest * share)) for share in SHARES]
    lengths.append(max(longest, lengths[-1] + 8))
    config = copy.deepcopy(asked.config)  # building a model writes into it
    with traced() as live:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
        model.requires_grad_(False)
        found = _layer_bytes(model)
        target = fake_target(model, asked.spec)
        before = live.now
        drafter = fake_drafter(recipe, asked.spec, kept, is_gpu)
        weights = live.now - before
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
        gradient = Gradient(drafter.trainable())
        after = live.now
        sizes = frozenset({asked.spec.vocab_size} | ({kept} if kept else set()))
        optimizers = build_optimizers(drafter.trainable(), train, sizes)

        def update() -> None:
            for optimizer in optimizers.values():
                optimizer.step()

        needs = drafter.needs()
        if train.sequence_parallel > 1:
            needs = replace(needs, teacher_rows=needs.teacher)
        step = TracedStep(live, target, drafter, train.precision == "bf16", update, needs)
        update()  # the optimizer's state is made by its first step
        optimizer = live.now - after
        ones, two, untraced = [], dict[str, int](), ""
        try:
            ones = [step.peaks(1, length) for length in lengths]
            two = step.peaks(2, lengths[0])
        except DATA_DEPENDENT as error:
            untraced = str(error).partition("\n")[0]
        flat = gradient.flat_N.untyped_storage().nbytes()
    phases = {
        name: Growth.through(lengths, [peaks[name] for peaks in ones], two[name]) for name in two
    }
    return StepBytes(
        *found,
        weights=weights,
        gradient=flat,
        optimizer=optimizer,
        phases=phases,
        untraced=untraced,
    )


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step on fake tensors, ready to be run at any size."""

    live: LiveBytes
    target: Target
    drafter: Drafter
    is_autocast: bool
    update: Any
    needs: Needs | None = None  # None: the drafter's

    def peaks(self, rows: int, seq_len: int) -> dict[str, int]:
        """Bytes above those that stay, at most, by phase. Each phase grows by itself: the highest
        of them at a short length need not be that at a long one."""
        live, found = self.live, dict[str, int]()
        before = live.begin()
        batch = capture(self.target, _batch(rows, seq_len), self.needs or self.drafter.needs())
        found[READING], found[FEATURES] = live.peak - before, _feature_bytes(batch)
        live.begin()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.is_autocast):
            out = self.drafter.loss(batch)
        found["the loss"] = live.peak - before
        live.begin()
        out.sum.backward()  # type: ignore[no-untyped-call]
        found["the gradient"] = live.peak - before
        del out, batch
        live.begin()
        self.update()
        found["the update"] = live.peak - before
        return found


def _batch(rows: int, seq_len: int) -> TrainBatch:
    ids_BS = torch.zeros(rows, seq_len, dtype=torch.long)
    position_BS = torch.arange(seq_len).expand(rows, seq_len).contiguous()
    return TrainBatch(ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), ids_BS, position_BS)


def _feature_bytes(batch: TrainBatch) -> int:
    """Of what the target said of a batch."""
    kept = [*batch.taps.values(), batch.teacher_BSV]
    kept.append(None if batch.teacher_rows is None else batch.teacher_rows.state_RD)
    storages = {id(x.untyped_storage()): x for x in kept if x is not None}
    return sum(x.untyped_storage().nbytes() for x in storages.values())


def fake_drafter(recipe: Recipe, spec: ModelSpec, kept: int | None, is_gpu: bool) -> Drafter:
    """The recipe's drafter, with its adapters, on the fake tensors of the surrounding trace."""
    family = trainable_family(recipe)
    options = family_options(family, completed(recipe, spec).drafter)
    if is_gpu and getattr(options, "chunk", 0) is None:
        chunk = fitting_chunk(kept or spec.vocab_size, torch.device("cuda"))
        options = replace(options, chunk=chunk)
    vocab = None if kept is None else VocabMap(torch.arange(kept), spec.vocab_size)
    drafter = family.build(options, spec, vocab)
    if recipe.train.lora is not None:
        attach(drafter, recipe.train.lora)
    return drafter


def fake_target(model: Any, spec: ModelSpec) -> Target:
    """A target around a model of the surrounding trace; it is read as it would be, not tried."""
    lm: LanguageModel | None = fast_llama_from_hf(model)
    if lm is None:
        try:
            refuse_stateful(type(model), model.config)
            lm = HfLM(model, kv_layers=ANY_KV)
        except IncompatibleError as error:
            lm = ReadingLM(model, (), error.found)
    return Target("traced", None, lm, None, "", None, None, spec.eos_ids)


def _layer_bytes(model: nn.Module) -> tuple[int, int, int]:
    """Of the weights: those of all layers, the others, and of the largest layer."""
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    stack = max(stacks, key=_weights_of, default=nn.ModuleList())
    each = [_weights_of(layer) for layer in stack]
    return sum(each), _weights_of(model) - sum(each), max(each, default=0)


def _weights_of(part: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in part.parameters())
