"""What a calibration works on: the target or one of its shape, rows of text or of random tokens.

Speed does not depend on what weights say, so a target that is not here is replaced by one of its
shape. Where the target's layers run in a server, one layer stands in for all of them, which is not
asked anything. Letters: B rows, D hidden width, S sequence.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Needs
from specctl.core.errors import SpecctlError
from specctl.recipes.schema import DataPart, TargetPart
from specctl.recipes.targets import resolve
from specctl.runtime.target.folders.hub import is_local
from specctl.runtime.target.target import Target, load_part
from specctl.train.data.prepare import encode_document
from specctl.train.data.records.layouts import field_choices
from specctl.train.data.records.records import Sample, without_images
from specctl.train.data.rows.pack import Document, pack
from specctl.train.data.rows.rows import TokenData, write_rows
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.sources import is_corpus, read_samples
from specctl.train.planning.data_shares import source_shares
from specctl.train.planning.target_shape import TargetShape

LIGHT = 1_000_000_000  # parameters of a target that a CPU makes, or reads, within seconds
TEXT_BYTES = 30_000_000  # of a source that are read, which takes a second or two
ENCODED = 60_000  # tokens
TOKENS_PER_SECOND = 300_000  # that a tokenizer makes, where there is none to ask


@dataclass(frozen=True, slots=True)
class SourceText:
    """The first samples of a source, and the seconds that reading all of it takes."""

    samples: tuple[Sample, ...]
    seconds: float


def stand_in(
    part: TargetPart, is_here: bool, shape: TargetShape, device: torch.device
) -> Target | None:
    """The target of a recipe, or one of its shape with random weights; None for one that a CPU
    would need minutes to make. Its tokenizer is only there with the target itself. `is_here`: its
    layers run in this process."""
    spec, is_cuda = shape.spec, device.type == "cuda"
    is_there = is_local(resolve(part.name, part.revision))
    if is_here and is_there and shape.parameters <= LIGHT:
        alone = {"device_map": None, "tensor_parallel": False}
        return load_part(part, device=str(device), is_read_only=True, is_widened=True, **alone)
    count = shape.parameters if is_here else 2 * spec.vocab_size * spec.hidden_size
    if shape.config is None or part.inflate is not None or (count > LIGHT and not is_cuda):
        return None
    config = copy.deepcopy(shape.config)
    if not is_here:
        _cut(config, spec.num_layers)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=shape.dtype(part, device))
    target = Target.from_model(model, is_read_only=True)
    lm: Any = target.lm
    lm.spec = replace(lm.spec, num_layers=spec.num_layers)
    return target


def _cut(config: Any, num_layers: int) -> None:
    """Leave one layer in a configuration."""
    config.num_hidden_layers = 1
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(config, name, value[:1])


def source_text(data: DataPart, clock: Callable[[], float]) -> SourceText:
    """Samples of the recipe's source. Nothing is asked of the hub."""
    sizes = [share.bytes for share in source_shares(data)]
    is_all = is_corpus(data.source)
    if not is_all and None in sizes:
        return SourceText((), 0.0)
    began, found, seen = clock(), list[Sample](), 0
    try:
        choices = field_choices(data)
        samples = read_samples(data.source, data.format, data.split, data.seed, Defects(), choices)
        for sample in map(without_images, samples):  # lengths are estimated by their texts
            sample.digest()
            seen += len(sample.text) + sum(len(str(message)) for message in sample.messages)
            if len(found) < data.prompts:
                found.append(sample)
            if seen > TEXT_BYTES and not is_all:
                break
    except SpecctlError:  # data that are not as they should be; the run will say it
        return SourceText((), 0.0)
    seconds = clock() - began
    share = 1.0 if is_all or seen <= TEXT_BYTES else sum(size or 0 for size in sizes) / seen
    return SourceText(tuple(found), seconds * share)


def encoding_seconds(
    target: Target, samples: Sequence[Sample], tokens: int, clock: Callable[[], float]
) -> float:
    """Seconds in which so many tokens of the source's own words are encoded."""
    if target.tokenizer is None or not samples:
        return tokens / TOKENS_PER_SECOND
    began, made = clock(), 0
    for sample in samples:
        if made >= min(ENCODED, tokens):
            break
        made += len(_encoded(target, sample))
    return (clock() - began) * tokens / max(made, 1)


def _encoded(target: Target, sample: Sample) -> tuple[int, ...]:
    try:
        return tuple(encode_document(target, sample, True).ids.tolist())
    except ValueError:
        return ()


def token_stream(target: Target, samples: Sequence[Sample], count: int, kept: int) -> list[int]:
    """`count` token ids: those of the text, else random ones below `kept`."""
    found = list[int]()
    if target.tokenizer is not None:
        for sample in samples:
            found += _encoded(target, sample)
            if len(found) >= count:
                return found[:count]
    if len(found) < 1000:
        rng = np.random.default_rng(0)
        return [int(each) for each in rng.integers(0, kept, count)]
    return list(itertools.islice(itertools.cycle(found), count))


def rows_of(
    data: DataPart, seq_len: int, stream: Sequence[int], pad_id: int, folder: Path
) -> TokenData:
    """The tokens as rows like those of the run: answers behind their prompts, and whole rows of
    text in the share that the recipe asks for."""
    answer = min(seq_len, data.prompt_tokens + data.new_tokens)
    answer = seq_len // (seq_len // answer)  # rows of the run are full, too: short ones fill gaps
    answers = data.prompts * answer if data.regenerate else 0
    text = data.text_tokens if data.regenerate else 1
    documents, place, answered = list[Document](), 0, 0
    while len(stream) - place >= 2:
        is_answer = answered * (answers + text) < answers * (place + 1)
        length = min(answer if is_answer else seq_len, len(stream) - place)
        mask = np.ones(length, dtype=np.bool_)
        if is_answer and not data.train_on_prompt:
            mask[: min(data.prompt_tokens, length - 1)] = False
        ids = np.array(stream[place : place + length], dtype=np.int32)
        documents.append(Document(ids, mask, "text"))
        place, answered = place + length, answered + length * is_answer
    packed = pack(documents, seq_len, pad_id, 0)
    manifest = write_rows(folder, packed, "0" * 64, {}, "source", Defects())
    return TokenData(folder, manifest)


def states_from_elsewhere(target: Target, batch: TrainBatch, needs: Needs) -> TrainBatch:
    """The batch with random taps and teacher, as they come from a server."""
    shape = (*batch.ids_BS.shape, target.spec.hidden_size)

    def states() -> Tensor:
        return torch.randn(shape, dtype=target.dtype, device=target.device)

    found = replace(batch, taps={tap: states() for tap in needs.taps})
    if not needs.teacher:
        return found
    head, state_BSD = target.borrowed(), states()
    if needs.teacher_rows:
        rows = HeadRows(state_BSD.flatten(0, 1), head.head_VD, head.head_bias_V)
        return replace(found, teacher_rows=rows)
    logits = torch.nn.functional.linear(state_BSD, head.head_VD, head.head_bias_V)
    return replace(found, teacher_BSV=logits)


def process_seconds(most: float = 60.0) -> float | None:
    """Age of this process; None where it cannot be asked, or is no start of a command any more."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = float(Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, ValueError, IndexError):
        return None
    return age if 0 < age < most else None


def now() -> float:
    """Seconds, to subtract."""
    return time.perf_counter()
