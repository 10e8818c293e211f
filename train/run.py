"""Recipe -> a trained drafter: assembles target, data, drafter, optimizer, and runs the loop.

OUT/run.yaml         the resolved recipe, the origin of every value, the exact command
OUT/data             the rows               OUT/checkpoints   states to resume from
OUT/metrics.jsonl    what happened          OUT/package       the drafter with the best measured tau
OUT/reference        the same for a first stage, where tokens are selected by comparison
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from specctl.core.drafter import Drafter
from specctl.core.errors import FileError, IntegrityError, RecipeError
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.target import Target, load_target
from specctl.train.assemble import trainable_family
from specctl.train.data.prepare import prepare
from specctl.train.data.rows import TokenData
from specctl.train.distributed.ranks import Ranks
from specctl.train.distributed.target_shards import spread
from specctl.train.init.initial import Loader, check_fit, initial_of, loaded
from specctl.train.job import RunInputs, make_job
from specctl.train.joint.check import check_joint, check_target
from specctl.train.joint.joint import JointModel
from specctl.train.joint.joint_target import FOLDER, log_change, say_change, settled
from specctl.train.loop import Job, TrainProgress, measure, restore, train
from specctl.train.lora import ADAPTER, merge, save_adapter
from specctl.train.planning.plan import RunPlan, build_shape, plan
from specctl.train.plot import save_learning_curve
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.fingerprint import check_same_run, config_fields
from specctl.train.saving.lock import locked
from specctl.train.saving.run_file import write_run_file
from specctl.train.selective import reference_stage
from specctl.train.stop import Stop

# package(drafter, target, folder, acceptance): writes the drafter; handed in by the command line,
# because this room may not import export.
Packager = Callable[[Drafter, Target, Path, Mapping[str, Any] | None], object]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left behind. After a dry run only `plan` says something. `target`: the changed
    one that the package is for, where the target learned, too."""

    out: Path
    best_checkpoint: Path | None
    tau: float | None
    steps: int
    seconds: float
    plan: RunPlan | None = None
    package: Path | None = None
    target: Path | None = None


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
    family = trainable_family(recipe)
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
        initial = initial_of(recipe, target, load)  # what it refuses, before answers are written
        check_fit(recipe, target.spec, initial)
        needs = build_shape(family, recipe, target.spec).needs()
        if recipe.train.joint is not None:
            check_target(target)
            check_joint(recipe, needs)
        data = _data(recipe, target, out, talker, ranks)
        target = spread(recipe, target, ranks)
        made = RunInputs(target, data, initial, stop, accelerator, load)
        stop.is_deferred = True
        reference = _reference(recipe, made, checkpoints, allow)
        job = make_job(recipe, made, checkpoints, reference)
        progress = _continue(job, snapshot, allow)
        progress = train(job, progress)
        acceptance = _best(job, progress, talker)
        written = out / "package"
        with job.drafter.whole() as drafter, ranks.together():
            if ranks.is_main:
                save_learning_curve(out / "metrics.jsonl", out / "curve.png")
                adapted = drafter.module
                if recipe.train.lora is not None and adapted is not None:
                    if recipe.train.lora.keep:
                        save_adapter(adapted, out / ADAPTER)
                    merge(adapted)
                if isinstance(job.drafter, JointModel):
                    target = settled(job.drafter, target, recipe, data, out)
                    say_change(target, out / FOLDER, talker)
                    log_change(target, job.log, progress.step)
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
        target=None if recipe.train.joint is None else out / FOLDER,
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


def _reference(
    recipe: Recipe, made: RunInputs, checkpoints: Checkpoints, allow: Collection[str]
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
        job = make_job(stage, made, places, None)
        progress = train(job, _continue(job, places.newest(), allow))
        _best(job, progress, reporter)
        reference = job.drafter
    else:
        return None
    for parameter in reference.trainable().values():
        parameter.requires_grad_(False)
    return reference


def _continue(job: Job, snapshot: Snapshot | None, allow: Collection[str]) -> TrainProgress:
    """Where the run stands: at the given state, or at the beginning."""
    if snapshot is None:
        job.log.rewind(-1, -1)
        return TrainProgress()
    for change in check_same_run(snapshot.fingerprint, job.fingerprint, allow):
        job.reporter.warn(f"continuing although {change}")
    job.reporter.say(f"continuing from step {snapshot.step:,}")
    return restore(job, snapshot)


def _best(job: Job, progress: TrainProgress, reporter: Reporter) -> dict[str, Any] | None:
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
