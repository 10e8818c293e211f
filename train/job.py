"""A recipe and what it was made for -> the Job that the loop works through.

Here the parts of a run meet: the drafter with its vocabulary, first weights and adapters; the order
of the rows and where a batch comes from; what is compared, measured, logged and saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter, Needs
from specctl.core.errors import RecipeError
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.forward.row_part import RowPart
from specctl.core.vocab import VocabMap
from specctl.recipes.schema import DataPart, DrafterPart, Recipe, TrainPart, VocabPart
from specctl.recipes.serve import ServePart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.assemble import (
    Prompts,
    build_drafter,
    decoder,
    estimator,
    measuring_images,
    measuring_prompts,
    measuring_rows,
    say_data,
    what_trains,
)
from specctl.train.data.on_policy import check_writer, text_of, writing_of
from specctl.train.data.prompts.suite_prompts import suite_prompts
from specctl.train.data.rows.rows import TokenData
from specctl.train.data.rows.supply import Order, Text
from specctl.train.distributed.in_step import InStepLM
from specctl.train.distributed.ranks import Ranks
from specctl.train.distributed.sequence import row_part
from specctl.train.distributed.sharding import Sharded, sharded_layers
from specctl.train.features.capture import capture, training_needs
from specctl.train.features.offline import BatchOf, Features, feature_source
from specctl.train.features.overlap import Overlapped, check_overlap
from specctl.train.features.reading import reading_target
from specctl.train.init.axes import with_axes
from specctl.train.init.initial import Initial, Loader, completed, initialise, tensors_digest
from specctl.train.joint.joint import JointModel
from specctl.train.loop import Job
from specctl.train.metrics.metrics import MeasuredAcceptance, MetricsLog
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.saving.fingerprint import config_fields, run_fingerprint
from specctl.train.saving.state import Optimizers, seed_everything
from specctl.train.step.compiled_layers import compile_layers
from specctl.train.step.lora import attach
from specctl.train.step.optim import Gradient, RecipeSchedule, build_optimizers
from specctl.train.step.selective import Selection, selection_of
from specctl.train.stop import Stop
from specctl.train.vocab.draft_vocab import draft_vocab, keep_vocab


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What the stages of a run share."""

    target: Target
    data: TokenData
    initial: Initial | None
    stop: Stop
    accelerator: Accelerator
    load: Loader | None


def make_job(
    recipe: Recipe, inputs: RunInputs, checkpoints: Checkpoints, reference: Drafter | None
) -> Job:
    """Everything the loop works with; `reference` is what the selection of tokens compares with."""
    settings, ranks, reporter = recipe.train, checkpoints.ranks, checkpoints.reporter
    target, data, out = inputs.target, inputs.data, checkpoints.folder.parent
    check_rows(recipe.train.rows, settings.groups(ranks.size))
    vocab = _vocab(recipe.vocab, recipe.data, inputs, checkpoints)
    drafter = _initial_drafter(recipe.drafter, settings, vocab, inputs, checkpoints)
    part = row_part(settings.sequence_parallel, drafter, ranks)
    needs = training_needs(drafter, part is not None)
    selection = selection_of(settings, drafter, reference)
    held = measuring_rows(recipe.data, data, target.can_run)
    num_rows = data.num_rows - len(held)
    say_data(recipe.data, settings, num_rows, reporter)
    trained = _trained(settings, drafter, target, ranks, reporter)
    if settings.compile:
        compile_layers(drafter.module, drafter.family)
    joint = trained if isinstance(trained, JointModel) else None
    trainable = trained.trainable()
    vocab_sizes = {target.spec.vocab_size} | ({drafter.vocab.size} if drafter.vocab else set())
    seed_everything(settings.seed, ranks.rank)
    order = Order(num_rows, settings.seed, recipe.data.on_policy)
    check_writer(recipe.drafter, recipe.data.on_policy, trained)
    writing = writing_of(recipe.data, settings, order, target.spec.pad_id or 0)
    text = text_of(writing, target, data, trained, ranks)
    features = Features(text.batch)
    reading = reading_target(target, settings)
    if joint is None:
        features = feature_source(
            recipe.data, settings.rows, reading, data, needs, out, reporter, ranks
        )
    check_overlap(settings, recipe.data, drafter)
    is_still = recipe.data.on_policy == 0.0
    read = Overlapped(features, ranks.device) if settings.overlap else None
    decoding = target if joint is None else joint.target
    if decoding.can_run:
        prompts = measuring_prompts(recipe.data, settings.tau_prompts, decoding, data)
        images = measuring_images(recipe.data, settings.tau_prompts, decoding, data)
        measure = _by_decoding(recipe.serve, settings, decoding, drafter, prompts, reporter, images)
    else:
        rows = held or range(data.num_rows)
        _warn_of_alphas(decoding.name, settings, reporter)
        measure = estimator(settings, recipe.serve.length, drafter, features.batch, rows)
    return Job(
        drafter=trained,
        settings=settings,
        schedule=RecipeSchedule(settings),
        order=order,
        ahead=_ahead(features, read) if is_still else None,
        settle=(lambda: None) if read is None else read.settle,
        batch=_batches(recipe.data, reading, needs, text, read or features, selection, part),
        measure=measure,
        optimizers=_optimizers(settings, trained, frozenset(vocab_sizes)),
        gradient=Gradient(trainable, ranks),
        checkpoints=checkpoints,
        log=MetricsLog(out / "metrics.jsonl", ranks.is_main, reporter.warn),
        stop=inputs.stop,
        reporter=reporter,
        out=out,
        draft_length=recipe.serve.length,
        measures_start=settings.lora is not None,
        measures_together=isinstance(target.lm, InStepLM),
        autocast=_autocast(settings.precision, ranks.device),
        fingerprint=_fingerprint(config_fields(recipe), inputs, drafter.vocab, ranks, reference),
        log_more=lambda figures, step: inputs.accelerator.log(figures, step),
        ranks=ranks,
        text=text,
    )


def _ahead(features: Features, read: Overlapped | None) -> Callable[[list[int]], None]:
    """Who is told what comes next: threads that read files, and the one that asks the target."""

    def ahead(rows: list[int]) -> None:
        features.ahead(rows)
        if read is not None:
            read.ahead(rows)

    return ahead


def _by_decoding(
    serve: ServePart,
    train: TrainPart,
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    reporter: Reporter,
    images: Sequence[PromptImages | None] | None,
) -> Callable[[], MeasuredAcceptance]:
    """Tau by decoding held-out prompts, and those of a suite."""
    suite = suite_prompts(train, target)
    if suite is not None:
        reporter.say(suite.text())
    return decoder(serve, train, target, drafter, prompts, suite, images)


def _warn_of_alphas(name: str, train: TrainPart, reporter: Reporter) -> None:
    """Of a target that cannot be run: tau follows from the alphas of held-out rows."""
    if train.tau_suite is not None:
        reporter.warn(f"tau is not measured on {train.tau_suite}: that needs decoding")
    reporter.warn(
        f"target {name} cannot be run here: tau is that of a chain by the alphas of "
        "text kept back, not measured by decoding"
    )


def _trained(
    settings: TrainPart, drafter: Drafter, target: Target, ranks: Ranks, reporter: Reporter
) -> Drafter:
    """What the loop moves: the drafter, its pieces, or it and additions to its target."""
    if settings.parallel == "fsdp" and ranks.size > 1:
        return Sharded(drafter, ranks, sharded_layers(target))
    if settings.joint is None:
        return drafter
    torch.manual_seed(settings.seed)  # the same additions on every process
    joint = JointModel(drafter, target, settings.joint)
    number = sum(joint.trainable()[name].numel() for name in joint.slow())
    alone = math.ceil(settings.joint.warmup * settings.steps)
    reporter.warn(
        f"this run CHANGES THE TARGET: {number:,} added parameters learn from step {alone:,} on; "
        "the drafter will be for OUT/target, which is another model"
    )
    if settings.joint.keep == "none":
        reporter.warn("nothing holds the target near itself (train.joint.keep: none)")
    return joint


def _optimizers(settings: TrainPart, trained: Drafter, vocab_sizes: frozenset[int]) -> Optimizers:
    """Over all that trains; additions to the target learn at their own share of the rate."""
    slow = trained.slow() if isinstance(trained, JointModel) else ()
    share = 1.0 if settings.joint is None else settings.joint.rate
    return build_optimizers(trained.trainable(), settings, vocab_sizes, slow, share)


def check_rows(rows: int, processes: int) -> None:
    """Refuse processes that would have no row of a batch."""
    if rows < processes:
        raise RecipeError(
            "fewer rows in a batch than processes",
            found=f"train.rows {rows}, {processes} processes",
            expected="at least one row per process (with sequence_parallel, per group of them)",
            do=f"--set train.rows={processes}",
            where="train.rows",
        )


def _initial_drafter(
    part: DrafterPart,
    train: TrainPart,
    vocab: VocabMap | None,
    inputs: RunInputs,
    checkpoints: Checkpoints,
) -> Drafter:
    """The drafter with its first weights and its adapters, announced."""
    target, initial, lora = inputs.target, inputs.initial, train.lora
    device, reporter = checkpoints.ranks.device, checkpoints.reporter
    complete = with_axes(completed(part, target.spec, initial), target, bool(inputs.data.images))
    drafter = build_drafter(complete, train, target.spec, vocab).to(device, torch.float32)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    if initial is not None:
        initialise(drafter, initial, inputs.data)
        reporter.say(f"starts from {initial.name} ({initial.digest[:19]})")
    if lora is not None:
        attach(drafter, lora, initial is not None)
    for line in what_trains(drafter):
        reporter.say(line)
    return drafter


def _vocab(
    how: VocabPart, part: DataPart, inputs: RunInputs, checkpoints: Checkpoints
) -> VocabMap | None:
    """The draft vocabulary: counted in the data, announced and kept beside them; else that of the
    drafter to start from."""
    target, data, initial = inputs.target, inputs.data, inputs.initial
    if how.size is None:
        return None if initial is None else initial.drafter.vocab
    vocab = draft_vocab(how, part, target, data)
    if vocab is not None and checkpoints.ranks.is_main:
        keep_vocab(vocab, how, target, data)
        reporter = checkpoints.reporter
        reporter.say(f"draft vocabulary: {vocab.size:,} of {target.spec.vocab_size:,} ids")
    return vocab


def _batches(
    part: DataPart,
    target: Target,
    needs: Needs,
    text: Text,
    features: BatchOf,
    selection: Selection | None,
    stretch: RowPart | None,
) -> BatchOf:
    """Row numbers -> a batch. Rows that the drafter writes itself have no features to keep."""

    def batch(rows: list[int]) -> TrainBatch:
        is_still = part.on_policy == 0.0
        read = features(rows) if is_still else capture(target, text.batch(rows), needs)
        read = replace(read, part=stretch)
        return read if selection is None else selection(read, rows)

    return batch


def _fingerprint(
    config: Mapping[str, Any],
    inputs: RunInputs,
    vocab: VocabMap | None,
    ranks: Ranks,
    reference: Drafter | None,
) -> dict[str, Any]:
    """What a resumed run must share with the run it continues."""
    target, initial = inputs.target, inputs.initial
    found = run_fingerprint(
        config,
        target.fingerprint,
        target.tokenizer_fingerprint,
        inputs.data.digest,
        None if vocab is None else vocab.digest(),
        ranks.size,
        None if initial is None else initial.digest,
    )
    if reference is not None:
        found["reference"] = tensors_digest(reference.tensors())
    return found


def _autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if precision == "no":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
