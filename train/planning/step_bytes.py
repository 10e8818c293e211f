"""Bytes of a training step on one process, by tracing the step itself on fake tensors.

The target's forward, the family's loss, its backward pass and the update run as they are, over the
rows that a process has and at their full length, on tensors without content (see `live_bytes`).
Whatever the code keeps is counted, and stays counted when the code changes. Nothing is allocated: a
target of 70B parameters takes seconds. They grow with the slices of logits, so that a batch of very
many is reckoned in a straight line from two smaller ones, both of which are large enough to be
fullest where it is.

Where the target's layers run in a server, only its embedding, final norm and head are there, and
its states come in from outside. Letters: B rows, D hidden width, K taps, N tokens, S sequence,
V target vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
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
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.hf_spec import refuse_stateful
from specctl.models.hf.read_only import ReadingLM
from specctl.models.llama.fast_llama import fast_llama_from_hf
from specctl.recipes.schema import DrafterPart, TrainPart
from specctl.runtime.target.placement.device import DTYPES
from specctl.runtime.target.served import ServedLM, StoredWeights
from specctl.runtime.target.target import Target
from specctl.train.assemble import family_options, trainable_family
from specctl.train.features.capture import read, training_needs
from specctl.train.features.target_source import FromStates, Text, layers_for
from specctl.train.init.initial import completed
from specctl.train.planning.live_bytes import LiveBytes, traced
from specctl.train.planning.work import passes
from specctl.train.step.lora import attach
from specctl.train.step.optim import Gradient, build_optimizers

READING, FEATURES = "the target reads", "its features"
MOST_SLICES = 160  # of logits in a traced step
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
ANY_KV = (KVShape(1, 1, 1, 1),)  # a fake model is not tried; nothing is decoded with it


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Of one process that holds everything whole: weights of the target, by whether they are those
    of layers, which may be spread; the drafter's weights, gradient and optimizer state; and the
    peak of each phase of a step above them."""

    layers: int
    beside_layers: int
    largest_layer: int
    weights: int
    gradient: int
    optimizer: int
    phases: Mapping[str, int]
    untraced: str = ""  # why the phases are not known: an operator whose result depends on content
    states: int = 0  # of a batch, as they come in from elsewhere

    @property
    def target(self) -> int:
        return self.layers + self.beside_layers

    @property
    def batch(self) -> int:
        """Peak of a step above what is always there; 0 where it is untraced."""
        return max(self.phases.values(), default=0)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step follows from beside its target and its rows: the drafter, the ids that its
    vocabulary keeps (None: all), how it learns, and whether the target's layers are elsewhere."""

    drafter: DrafterPart
    train: TrainPart
    kept: int | None = None
    is_elsewhere: bool = False


def step_bytes(
    settings: StepSettings,
    config: Any,
    spec: ModelSpec,
    dtype: str,
    is_gpu: bool,
    rows: int,
    parts: int = 1,
) -> StepBytes:
    """The bytes of a step over so many rows, for a target of that transformers configuration, held
    in that dtype. `is_gpu`: with the slices of logits that a GPU gets. `parts`:
    processes that compute one row together, each with the features of all of it."""
    told = json.dumps(config.to_diff_dict(), sort_keys=True, default=str)
    drafter = settings.drafter.model_dump_json()
    kept = None if settings.kept is None else min(settings.kept, spec.vocab_size)
    train = settings.train
    how = (train.precision, train.optimizer, train.seq_len, train.lora)
    key = (told, drafter, how, settings.is_elsewhere, kept, dtype, is_gpu, rows, parts)
    return _Known(settings, config, spec).bytes(key)


class _Known:
    """A question to the cache: what is asked, hashed and compared by its key alone."""

    def __init__(self, settings: StepSettings, config: Any, spec: ModelSpec) -> None:
        self.settings, self.config, self.spec = settings, config, spec
        self.key: tuple[Any, ...] = ()

    def bytes(self, key: tuple[Any, ...]) -> StepBytes:
        self.key = key
        return _asked(self)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.key == self.key


@lru_cache(maxsize=128)
def _asked(asked: _Known) -> StepBytes:
    *_, is_elsewhere, kept, dtype, is_gpu, rows, parts = asked.key
    part, train = asked.settings.drafter, asked.settings.train
    known = _known_peaks((*asked.key[:-2], train.sequence_parallel > 1))
    config = copy.deepcopy(asked.config)  # building a model writes into it
    with traced() as live:
        if is_elsewhere:
            target = served_target(config, asked.spec, DTYPES[dtype])
            found = (0, live.now, 0)
        else:
            # Fake grouped products of experts are of bfloat16 alone; others depend on content.
            how = {} if dtype == "bfloat16" else {"experts_implementation": "eager"}
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], **how).eval()
            model.requires_grad_(False)
            found = _layer_bytes(model)
            target = fake_target(model, asked.spec)
        before = live.now
        drafter = fake_drafter(part, train, asked.spec, kept, is_gpu)
        weights = live.now - before
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
        if not drafter.trainable():  # the target alone learns: `joint_memory` counts its step
            return StepBytes(*found, weights, gradient=0, optimizer=0, phases={}, untraced="")
        gradient = Gradient(drafter.trainable())
        after = live.now
        sizes = frozenset({asked.spec.vocab_size} | ({kept} if kept else set()))
        optimizers = build_optimizers(drafter.trainable(), train, sizes)

        def update() -> None:
            for optimizer in optimizers.values():
                optimizer.step()

        needs = training_needs(drafter, train.sequence_parallel > 1)
        step = TracedStep(live, target, drafter, train.precision == "bf16", update, needs, known)
        update()  # the optimizer's state is made by its first step
        optimizer = live.now - after
        phases, untraced = dict[str, int](), ""
        try:
            phases = step.shared(rows, train.seq_len, parts, is_gpu)
        except DATA_DEPENDENT as error:
            untraced = str(error).partition("\n")[0]
        flat = gradient.flat_N.untyped_storage().nbytes()
    return StepBytes(
        *found,
        weights=weights,
        gradient=flat,
        optimizer=optimizer,
        phases=phases,
        untraced=untraced,
        states=_states(drafter, target, rows * train.seq_len) if is_elsewhere else 0,
    )


@lru_cache(maxsize=128)
def _known_peaks(key: tuple[Any, ...]) -> dict[tuple[int, int], dict[str, int]]:
    """Those traced so far of what differs in its rows alone, by rows and length."""
    return {}


def _states(drafter: Drafter, target: Target, tokens: int) -> int:
    layers = layers_for(target, drafter.needs())
    return tokens * len(layers) * target.spec.hidden_size * target.dtype.itemsize


def _most_rows(drafter: Drafter, seq_len: int, is_gpu: bool) -> int:
    """Rows whose logits are no more slices than are traced."""
    width = drafter.spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    given = getattr(drafter.options, "chunk", None)
    chunk = given or fitting_chunk(width, torch.device("cuda" if is_gpu else "cpu"))
    return max(2, MOST_SLICES * chunk // (passes(drafter) * seq_len))


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step on fake tensors, ready to be run at any size."""

    live: LiveBytes
    target: Target
    drafter: Drafter
    is_autocast: bool
    update: Any
    needs: Needs | None = None  # None: the drafter's
    known: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)

    def shared(self, rows: int, seq_len: int, parts: int, is_gpu: bool) -> dict[str, int]:
        """The peaks of a process that computes one of `parts` stretches of each row: the target
        reads all of it, and its features stay."""
        whole = self.reckoned(rows, seq_len, _most_rows(self.drafter, seq_len, is_gpu))
        if parts == 1:
            return whole
        length = -(-seq_len // parts)
        own = self.reckoned(rows, length, _most_rows(self.drafter, length, is_gpu))
        more = whole[FEATURES] - own[FEATURES]
        return {
            name: peak if name in (READING, FEATURES) else own[name] + more
            for name, peak in whole.items()
        }

    def reckoned(self, rows: int, seq_len: int, most: int) -> dict[str, int]:
        """The same of any number of rows: `peaks`, or in a straight line from those of at most
        `most` rows."""
        if rows <= most:
            return self._once(rows, seq_len)
        half = most // 2
        low, high = self._once(half, seq_len), self._once(most, seq_len)
        share = (rows - most) / (most - half)
        return {name: round(high[name] + share * (high[name] - low[name])) for name in high}

    def _once(self, rows: int, seq_len: int) -> dict[str, int]:
        if (rows, seq_len) not in self.known:
            self.known[rows, seq_len] = self.peaks(rows, seq_len)
        return self.known[rows, seq_len]

    def peaks(self, rows: int, seq_len: int) -> dict[str, int]:
        """Bytes above those that stay, at most, by phase. Each phase grows by itself: the highest
        of them at a short length need not be that at a long one."""
        live, found = self.live, dict[str, int]()
        before = live.begin()
        batch = self._read(_batch(rows, seq_len))
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

    def _read(self, batch: TrainBatch) -> TrainBatch:
        needs = self.needs or training_needs(self.drafter)
        if isinstance(self.target.lm, ServedLM):
            return FromStates(self.target, _NoStates(self.target)).made(batch, needs)
        with torch.no_grad():
            return read(self.target, batch, needs)


def _batch(rows: int, seq_len: int) -> TrainBatch:
    """Packed rows: the last token of each is a document of its own (`Seen.text` of shapes)."""
    ids_BS = torch.zeros(rows, seq_len, dtype=torch.long)
    document_BS = torch.zeros_like(ids_BS)
    position_BS = torch.arange(seq_len).expand(rows, seq_len).contiguous()
    document_BS[:, -1:], position_BS[:, -1:] = 1, 0
    return TrainBatch(ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), document_BS, position_BS)


def _feature_bytes(batch: TrainBatch) -> int:
    """Of what the target said of a batch."""
    kept = [*batch.taps.values(), batch.teacher_BSV]
    kept.append(None if batch.teacher_rows is None else batch.teacher_rows.state_RD)
    storages = {x.untyped_storage()._cdata: x for x in kept if x is not None}
    return sum(x.untyped_storage().nbytes() for x in storages.values())


def fake_drafter(
    part: DrafterPart, train: TrainPart, spec: ModelSpec, kept: int | None, is_gpu: bool
) -> Drafter:
    """The recipe's drafter, with its adapters, on the fake tensors of the surrounding trace."""
    family = trainable_family(part, train.joint)
    options = family_options(family, completed(part, spec))
    if is_gpu and getattr(options, "chunk", 0) is None:
        chunk = fitting_chunk(kept or spec.vocab_size, torch.device("cuda"))
        options = replace(options, chunk=chunk)
    vocab = None if kept is None else VocabMap(torch.arange(kept), spec.vocab_size)
    drafter = family.build(options, spec, vocab)
    if train.lora is not None:
        attach(drafter, train.lora)
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


class _NoWeights(StoredWeights):
    """A checkpoint on fake tensors: every tensor has its shape and no content."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.folder, self.dtype = Path(), dtype

    def whole(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class _NoStates:
    """States of any text, which take no room of their own: they come in one by one."""

    target: Target

    def states(self, texts: Sequence[Text], layers: Sequence[int]) -> list[Tensor]:
        one = torch.zeros(1, dtype=self.target.dtype)
        width = self.target.spec.hidden_size
        return [one.expand(len(text), len(layers), width) for text in texts]


def served_target(config: Any, spec: ModelSpec, dtype: torch.dtype) -> Target:
    """A target whose layers are elsewhere: its embedding, norm and head, in the surrounding
    trace."""
    lm = ServedLM(config, _NoWeights(dtype), spec.eos_ids, dtype, torch.device("cpu"))
    lm.borrowed()
    lm.normed(torch.zeros(1, spec.hidden_size, dtype=dtype))
    return Target("traced", None, lm, None, "", None, None, spec.eos_ids)


def _layer_bytes(model: nn.Module) -> tuple[int, int, int]:
    """Of the weights: those of all layers, the others, and of the largest layer."""
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    stack = max(stacks, key=_weights_of, default=nn.ModuleList())
    each = [_weights_of(layer) for layer in stack]
    return sum(each), _weights_of(model) - sum(each), max(each, default=0)


def _weights_of(part: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in part.parameters())
