"""Recipe -> a trained drafter: assembles target, data, drafter, optimizer, and runs the loop.

OUT/run.yaml         the resolved recipe, the origin of every value, the exact command
OUT/data             the rows               OUT/checkpoints   states to resume from
OUT/metrics.jsonl    what happened          OUT/package       the drafter with the best measured tau
OUT/reference        the same for a first stage, where tokens are selected by comparison
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedType

from specctl.drafters.parts.base import Drafter
from specctl.drafters.parts.batch import TrainBatch
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import FileError, IntegrityError, RecipeError
from specctl.recipes.schema import Recipe
from specctl.runtime.report import Reporter, SilentReporter
from specctl.runtime.target import Target, load_target
from specctl.train.adapt import ADAPTER, attach, merge, save_adapter
from specctl.train.assemble import (
    build_drafter,
    decoder,
    measuring_prompts,
    measuring_rows,
    say_data,
    trainable_family,
    what_trains,
)
from specctl.train.capture import capture
from specctl.train.data.on_policy import text_of
from specctl.train.data.order import Order
from specctl.train.data.prepare import prepare
from specctl.train.data.rows import TokenData
from specctl.train.features.offline import feature_source
from specctl.train.initial import (
    Initial,
    Loader,
    completed,
    initial_of,
    initialise,
    loaded,
    tensors_digest,
)
from specctl.train.loop import Job, Progress, measure, restore, train
from specctl.train.metrics import MetricsLog
from specctl.train.optim import Gradient, build_optimizers
from specctl.train.plan import Plan, plan
from specctl.train.plot import save_learning_curve
from specctl.train.processes.ranks import Ranks
from specctl.train.processes.sharding import Sharded
from specctl.train.processes.target_shards import spread, spread_layers
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.fingerprint import check_same_run, config_fields, run_fingerprint
from specctl.train.saving.lock import locked
from specctl.train.saving.state import seed_everything
from specctl.train.saving.store import write_bytes
from specctl.train.selective import reference_stage, selection_of
from specctl.train.stop import Stop
from specctl.train.vocab.draft_vocab import draft_vocab

# package(drafter, target, folder, acceptance): writes the drafter; handed in by the command line,
# because this room may not import export.
Packager = Callable[[Drafter, Target, Path, Mapping[str, Any] | None], object]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left behind. After a dry run only `plan` says something."""

    out: Path
    best_checkpoint: Path | None
    tau: float | None
    steps: int
    seconds: float
    plan: Plan | None = None
    package: Path | None = None


def train_draft(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = True,
    dry_run: bool = False,
    reporter: Reporter | None = None,
    command: Sequence[str] = (),
    allow: Collection[str] = (),
    package: Packager | None = None,
    load: Loader | None = None,
    target: Target | None = None,
) -> RunResult:
    """Train the recipe's drafter in the run folder `out`, or continue the run that is there.

    `load` reads the folder that drafter.init may name. `allow` names what may differ from the run
    being continued: config, target, data, vocab, init, world-size. Raises Interrupted (exit 75)
    after a signal, with the state saved.
    """
    trainable_family(recipe)
    if dry_run:
        return RunResult(out, None, None, 0, 0.0, plan=plan(recipe, out=out))
    stop = Stop(shlex.join(command) if command else "run the same command again")
    with ExitStack() as held:
        held.enter_context(stop.listening())
        accelerator = _accelerator(recipe, out)
        ranks = Ranks.current(accelerator.device)
        talker = (reporter or SilentReporter()) if ranks.is_main else SilentReporter()
        with ranks.together():
            if ranks.is_main:
                out.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(out, talker))
        checkpoints = Checkpoints(out / "checkpoints", talker, recipe.train.keep, ranks)
        snapshot = _found(recipe, checkpoints, resume, allow)
        if ranks.is_main:
            write_run_file(recipe, out, command)
        target = target or _load_target(recipe, accelerator.device)
        data = _data(recipe, target, out, talker, ranks)
        initial = initial_of(recipe, target, load)
        target = spread(recipe, target, ranks)
        made = _Made(target, data, initial, stop, accelerator, load)
        stop.is_deferred = True
        reference = _reference(recipe, made, checkpoints, allow)
        job = _job(recipe, made, checkpoints, reference)
        progress = _continue(job, snapshot, allow)
        progress = train(job, progress)
        acceptance = _best(job, progress, talker)
        written = out / "package"
        with job.drafter.whole() as drafter, ranks.together():
            if ranks.is_main:
                save_learning_curve(out / "metrics.jsonl", out / "curve.png")
                if recipe.train.lora is not None:
                    if recipe.train.lora.keep:
                        save_adapter(drafter, out / ADAPTER)
                    merge(drafter)
                if package is not None:
                    package(drafter, target, written, acceptance)
        accelerator.end_training()
    best = None if progress.best_step is None else job.checkpoints.path(progress.best_step)
    return RunResult(
        out=out,
        best_checkpoint=best,
        tau=None if acceptance is None else acceptance["tau"],
        steps=progress.step,
        seconds=progress.seconds,
        package=written if package is not None else None,
    )


def _accelerator(recipe: Recipe, out: Path) -> Accelerator:
    """Devices, processes and trackers. Precision is the recipe's, applied by the loop itself."""
    trackers = list(recipe.train.trackers)
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"tracker {name} is not installed",
                expected="an installed tracker of Accelerate",
                do=f"pip install {name}, or --set train.trackers=[]",
                where="train.trackers",
            )
    accelerator = Accelerator(log_with=trackers or None, project_dir=str(out))
    if accelerator.distributed_type == DistributedType.FSDP and recipe.train.parallel != "fsdp":
        raise RecipeError(
            "Accelerate was told to shard and the recipe was not",
            found=f"an FSDP configuration, train.parallel: {recipe.train.parallel}",
            expected="the same in both",
            do="--set train.parallel=fsdp, or launch with recipes/accelerate/ddp.yaml",
            where="train.parallel",
        )
    if trackers:
        accelerator.init_trackers("specctl")
    return accelerator


def _found(
    recipe: Recipe, checkpoints: Checkpoints, resume: bool, allow: Collection[str]
) -> Snapshot | None:
    """The state to continue from. A changed recipe is refused here, before anything is written."""
    if not resume and checkpoints.steps():
        raise FileError(
            "the run folder already holds a run",
            found=str(checkpoints.folder),
            expected="an empty folder",
            do="choose another --out, or leave --no-resume out to continue it",
            where=str(checkpoints.folder.parent),
        )
    snapshot = checkpoints.newest()
    if snapshot is not None:
        now = {"config": config_fields(recipe), "world-size": checkpoints.ranks.size}
        check_same_run(snapshot.fingerprint, now, allow)
    return snapshot


def write_run_file(recipe: Recipe, out: Path, command: Sequence[str]) -> None:
    """OUT/run.yaml, which `--recipe OUT` reads back. A run that goes on unchanged keeps its own:
    where its values came from, and the command that began it."""
    path = out / "run.yaml"
    if _recorded(path) == recipe.to_json():
        return
    names = ("specctl", "torch", "transformers", "accelerate", "safetensors")
    described = {
        "command": shlex.join(command),
        "versions": {name: _version(name) for name in names},
        "recipe": recipe.to_json(),
        "origin": recipe.origin,
    }
    write_bytes(path, yaml.safe_dump(described, sort_keys=False).encode())


def _recorded(path: Path) -> object:
    """The recipe in a run file; None without one that can be read."""
    try:
        return yaml.safe_load(path.read_text())["recipe"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _load_target(recipe: Recipe, device: torch.device) -> Target:
    part = recipe.target
    return load_target(
        part.name,
        revision=part.revision,
        dtype=part.dtype,
        device=str(device),
        inflate=part.inflate,
    )


def _data(recipe: Recipe, target: Target, out: Path, reporter: Reporter, ranks: Ranks) -> TokenData:
    """The rows; the first rank makes them, the others then find them made."""
    data: TokenData | None = None
    with ranks.together():
        if ranks.is_main:
            data = prepare(recipe, target, out, reporter)
    return data if data is not None else prepare(recipe, target, out)


def _vocab(
    recipe: Recipe, target: Target, data: TokenData, initial: Initial | None
) -> VocabMap | None:
    """The draft vocabulary: counted in the data, else that of the drafter to start from."""
    if recipe.vocab.size is None:
        return None if initial is None else initial.drafter.vocab
    return draft_vocab(recipe, target, data)


@dataclass(frozen=True, slots=True)
class _Made:
    """What the stages of a run share."""

    target: Target
    data: TokenData
    initial: Initial | None
    stop: Stop
    accelerator: Accelerator
    load: Loader | None


def _reference(
    recipe: Recipe, made: _Made, checkpoints: Checkpoints, allow: Collection[str]
) -> Drafter | None:
    """What the selection of tokens compares with: a drafter of a folder, or one trained first in
    OUT/reference, which a resumed run finds as it stood."""
    ranks, reporter = checkpoints.ranks, checkpoints.reporter
    stage, name = reference_stage(recipe), recipe.train.reference
    if name is not None:
        reference = loaded(name, made.target, made.load, "train.reference").to(
            ranks.device, torch.float32
        )
        if reference.needs().borrow:
            reference.bind(made.target.borrowed())
    elif stage is not None:
        out = checkpoints.folder.parent / "reference"
        with ranks.together():
            if ranks.is_main:
                out.mkdir(exist_ok=True)
        reporter.say(f"first the reference: {stage.train.steps:,} steps in {out}")
        places = Checkpoints(out / "checkpoints", reporter, stage.train.keep, ranks)
        job = _job(stage, made, places, None)
        progress = train(job, _continue(job, places.newest(), allow))
        _best(job, progress, reporter)
        reference = job.drafter
    else:
        return None
    for parameter in reference.trainable().values():
        parameter.requires_grad_(False)
    return reference


def _job(recipe: Recipe, made: _Made, checkpoints: Checkpoints, reference: Drafter | None) -> Job:
    """Everything the loop works with."""
    settings, ranks, reporter = recipe.train, checkpoints.ranks, checkpoints.reporter
    target, data, initial = made.target, made.data, made.initial
    out = checkpoints.folder.parent
    if settings.rows < ranks.size:
        raise RecipeError(
            "fewer rows in a batch than processes",
            found=f"train.rows {settings.rows}, {ranks.size} processes",
            expected="at least one row per process",
            do=f"--set train.rows={ranks.size}",
            where="train.rows",
        )
    vocab = _vocab(recipe, target, data, initial)
    complete = completed(recipe, target.spec, initial)
    drafter = build_drafter(complete, target.spec, vocab).to(ranks.device, torch.float32)
    needs = drafter.needs()
    if needs.borrow:
        drafter.bind(target.borrowed())
    if initial is not None:
        initialise(drafter, initial, data)
        reporter.say(f"starts from {initial.name} ({initial.digest[:19]})")
    if settings.lora is not None:
        attach(drafter, settings.lora, initial is not None)
    for line in what_trains(drafter):
        reporter.say(line)
    num_rows = data.num_rows - len(measuring_rows(recipe, data))
    say_data(recipe, num_rows, reporter)
    selection = selection_of(recipe, drafter, reference)
    trained = drafter
    if settings.parallel == "fsdp" and ranks.size > 1:
        trained = Sharded(drafter, ranks, spread_layers(target))
    trainable = trained.trainable()
    vocab_sizes = frozenset({target.spec.vocab_size} | ({vocab.size} if vocab else set()))
    seed_everything(settings.seed, ranks.rank)
    order = Order(num_rows, settings.seed, recipe.data.on_policy)
    text = text_of(recipe, target, data, trained, order, ranks)
    features = feature_source(recipe, target, data, needs, out, reporter, ranks)

    def batch(rows: list[int]) -> TrainBatch:
        is_still = recipe.data.on_policy == 0.0
        read = features(rows) if is_still else capture(target, text.batch(rows), needs)
        return read if selection is None else selection(read, rows)

    return Job(
        drafter=trained,
        settings=settings,
        order=order,
        batch=batch,
        measure=decoder(recipe, target, drafter, measuring_prompts(recipe, target, data)),
        optimizers=build_optimizers(trainable, settings, vocab_sizes),
        gradient=Gradient(trainable, ranks),
        checkpoints=checkpoints,
        log=MetricsLog(out / "metrics.jsonl", ranks.is_main, reporter.warn),
        stop=made.stop,
        reporter=reporter,
        out=out,
        draft_length=recipe.serve.length,
        measures_start=settings.lora is not None,
        autocast=_autocast(settings.precision, ranks.device),
        fingerprint=run_fingerprint(
            recipe,
            target.fingerprint,
            target.tokenizer_fingerprint,
            data.digest,
            None if vocab is None else vocab.digest(),
            ranks.size,
            None if initial is None else initial.digest,
        )
        | ({} if reference is None else {"reference": tensors_digest(reference.tensors())}),
        log_more=lambda figures, step: made.accelerator.log(figures, step),
        ranks=ranks,
        text=text,
    )


def _autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if precision == "no":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def _continue(job: Job, snapshot: Snapshot | None, allow: Collection[str]) -> Progress:
    """Where the run stands: at the given state, or at the beginning."""
    if snapshot is None:
        job.log.rewind(-1, -1)
        return Progress()
    for change in check_same_run(snapshot.fingerprint, job.fingerprint, allow):
        job.reporter.warn(f"continuing although {change}")
    job.reporter.say(f"continuing from step {snapshot.step:,}")
    return restore(job, snapshot)


def _best(job: Job, progress: Progress, reporter: Reporter) -> dict[str, Any] | None:
    """Put the weights with the highest measured tau into the drafter; returns what was measured."""
    found = progress.best
    if progress.best_step is not None and progress.best_step != progress.step:
        try:
            best = job.checkpoints.load(progress.best_step)
            job.drafter.load_tensors(best.tensors["model"])
        except IntegrityError as error:
            reporter.warn(f"{error}; the weights of the last step are packaged instead")
            found = measure(job).to_json() | {"step": progress.step}
    assert job.drafter.module is not None
    job.drafter.module.eval()
    return found
