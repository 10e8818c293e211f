"""Recipe -> a trained drafter: assembles target, data, drafter, optimizer, and runs the loop.

OUT/run.yaml         the resolved recipe, the origin of every value, the exact command
OUT/data             the rows               OUT/checkpoints   states to resume from
OUT/metrics.jsonl    what happened          OUT/package       the drafter with the best measured tau
OUT/finished.json    what a finished run found; it is left alone from then on
OUT/reference        the same for a first stage, where tokens are selected by comparison
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from specctl.core.drafter import Drafter
from specctl.core.errors import FileError, IntegrityError, RecipeError
from specctl.core.files import write_json
from specctl.core.kept_memory import kept_memory
from specctl.recipes.low_rank import LoraPart
from specctl.recipes.schema import Recipe, TrainPart
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.device import refuse_idle_cuda, slow_dtype
from specctl.runtime.target.served import ServedLM, load_served
from specctl.runtime.target.target import Target, load_part
from specctl.train.assemble import attention_only, check_answers, trainable_family
from specctl.train.data.growth import LearnedRows
from specctl.train.data.prepare import prepare, rows_digest
from specctl.train.data.suite_prompts import suite_prompts
from specctl.train.distributed.in_step import check_spread, in_step
from specctl.train.distributed.ranks import Ranks
from specctl.train.distributed.run_device import is_cpu_chosen
from specctl.train.distributed.sharding import shard_target
from specctl.train.init.initial import Initial, Loader, check_fit, initial_of, loaded
from specctl.train.job import RunInputs, make_job
from specctl.train.joint.check import check_joint, check_target
from specctl.train.joint.joint import JointModel
from specctl.train.joint.joint_target import FOLDER, log_change, save_joint_target, say_change
from specctl.train.loop import Job, TrainProgress, measure, restore, train
from specctl.train.lora import ADAPTER, merge, save_adapter, unnameable
from specctl.train.metrics import read_log
from specctl.train.optim import RecipeSchedule
from specctl.train.overfitting import overfitting
from specctl.train.planning.capacity import lacking_disk, refuse_lacks
from specctl.train.planning.plan import RunPlan, build_shape, disk_needs, plan
from specctl.train.plot import save_learning_curve
from specctl.train.runs.finished import MARK, read_mark
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.fingerprint import (
    RESTART,
    check_same_run,
    config_fields,
    packaged_fields,
    run_fingerprint,
)
from specctl.train.saving.lock import locked
from specctl.train.saving.run_file import RECORD, write_run_file
from specctl.train.selective import reference_stage
from specctl.train.stop import Stop

# package(drafter, target, folder, acceptance): writes the drafter; handed in by the command line,
# because this room may not import export.
Packager = Callable[[Drafter, Target, Path, Mapping[str, Any] | None], object]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of a run. After a dry run only `plan` says something. `target`: the changed
    one that the package is for, where the target learned, too. `suite`: name, tau and prompts of
    the suite that tau was also measured on."""

    out: Path
    best_checkpoint: Path | None
    tau: float | None
    steps: int
    seconds: float
    plan: RunPlan | None = None
    package: Path | None = None
    target: Path | None = None
    suite: Mapping[str, Any] | None = None


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
    package_folder: Path | None = None,
) -> RunResult:
    """Train the recipe's drafter in the run folder `out`, or continue the run that is there; one
    that is finished is left as it is. The package goes to `package_folder`, else to OUT/package.

    `load` reads the folder that drafter.init may name. `allow` names what may differ from the run
    being continued: config, target, data, vocab, init, world-size; `restart` lets one that has no
    whole checkpoint left begin again. Raises Interrupted (exit 75) after a signal, with the state
    saved.
    """
    trainable_family(recipe)
    if dry_run:
        return RunResult(out, None, None, 0, 0.0, plan=plan(recipe, out=out))
    stop = Stop(shlex.join(command) if command else "run the same command again")
    with ExitStack() as held:
        held.enter_context(stop.listening())
        accelerator = _accelerator(recipe.train, out)
        held.enter_context(kept_memory(accelerator.device))
        ranks = Ranks.current(accelerator.device)
        talker = (reporter or SilentReporter()) if ranks.is_main else SilentReporter()
        with ranks.together():
            if ranks.is_main:
                held.enter_context(locked(out, talker, [RECORD]))
        checkpoints = Checkpoints(out / "checkpoints", talker, recipe.train.keep, ranks)
        if not resume:
            _refuse_second(checkpoints)
        mark = finished_mark(recipe, out, allow)
        if mark is not None and mark["package"] is None:
            mark = None  # its checkpoints are all it left; there is no package to leave alone
        snapshot = None if mark is not None else _found(recipe, checkpoints, allow)
        check_spread(recipe, ranks.size)
        is_elsewhere = recipe.data.target_source != "inprocess"
        if target is None or (is_elsewhere and not isinstance(target.lm, ServedLM)):
            target = _load_target(recipe, accelerator.device)
            for note in target.notes:
                talker.say(f"note: {note}")
            if target.spread is not None:
                talker.say(f"target {target.name}: {target.spread}; its forward is transformers'")
        if (slow := slow_dtype(target.dtype, target.device)) is not None:
            talker.warn(f"{slow}: --set target.dtype=auto computes in float32")
        target = in_step(recipe, target, ranks)
        # what this refuses, before answers are written
        initial = initial_of(recipe.drafter, target, load)
        if mark is not None:
            if not _changes(mark, recipe, target, initial, ranks, allow, out):
                talker.say(f"{finished_text(mark)}: {out} is left as it is")
                accelerator.end_training()
                return marked_result(mark, recipe, out)
            snapshot = _found(recipe, checkpoints, allow)
        _check(recipe, target, initial)
        with ranks.together():
            if ranks.is_main:
                room = [(out, disk_needs(recipe, target.spec))]
                refuse_lacks(lacking_disk(room), "what the run will write", out)
        begin = partial(_begin, recipe, out, command, ranks)
        if snapshot is None:
            begin()
        data = prepare(recipe, target, out, talker, ranks, _learned(recipe, snapshot, allow, begin))
        target = shard_target(recipe, target, ranks)
        inputs = RunInputs(target, data, initial, stop, accelerator, load)
        reference = _reference(recipe, inputs, checkpoints, allow)
        stop.is_deferred = False  # features that are read keep what is finished
        job = make_job(recipe, inputs, checkpoints, reference)
        progress = _continue(job, snapshot, allow)
        job = replace(job, schedule=RecipeSchedule(recipe.train, progress.began))
        progress = train(job, progress)
        acceptance = _best(job, progress, talker)
        best = None if progress.best_step is None else job.checkpoints.path(progress.best_step)
        result = RunResult(
            out=out,
            best_checkpoint=best,
            tau=None if acceptance is None else acceptance["tau"],
            steps=progress.step,
            seconds=progress.seconds,
            package=None if package is None else package_folder or out / "package",
            target=None if recipe.train.joint is None else out / FOLDER,
            suite=None if acceptance is None else acceptance.get("suite"),
        )
        with job.drafter.whole() as drafter, ranks.together():
            if ranks.is_main:
                _save_results(drafter, job, inputs, recipe, result, acceptance, package)
        accelerator.end_training()
    return result


def _begin(recipe: Recipe, out: Path, command: Sequence[str], ranks: Ranks) -> None:
    """Write down that the folder holds this run, and that it is not finished."""
    if ranks.is_main:
        (out / MARK).unlink(missing_ok=True)
        write_run_file(recipe, out, command)


def _learned(
    recipe: Recipe, snapshot: Snapshot | None, allow: Collection[str], begin: Callable[[], None]
) -> LearnedRows | None:
    """What the run has made of its rows; None of one that is at its beginning."""
    if snapshot is None:
        return None
    digest = snapshot.fingerprint.get("data")
    return LearnedRows(digest, snapshot.step, recipe.train.steps, "data" in allow, begin)


def _save_results(
    drafter: Drafter,
    job: Job,
    inputs: RunInputs,
    recipe: Recipe,
    result: RunResult,
    acceptance: Mapping[str, Any] | None,
    package: Packager | None,
) -> None:
    """Write the results of a run: its curve, its additions, the changed target, the package,
    and last the mark that it is finished."""
    out, target, log = result.out, inputs.target, result.out / "metrics.jsonl"
    save_learning_curve(log, out / "curve.png")
    if log.exists() and (learned := overfitting(list(read_log(log)))) is not None:
        job.reporter.warn(learned)
    adapted = drafter.module
    if recipe.train.lora is not None and adapted is not None:
        if recipe.train.lora.keep:
            _save_additions(adapted, recipe.train.lora, recipe.drafter.init, out, job.reporter)
        merge(adapted)
    if isinstance(job.drafter, JointModel):
        target = save_joint_target(job.drafter, target, recipe, inputs.data, out)
        say_change(target, out / FOLDER, job.reporter)
        log_change(target, job.log, result.steps)
    if package is not None and result.package is not None:
        package(drafter, target, result.package, acceptance)
    write_mark(recipe, result, job.fingerprint)


def _save_additions(
    module: nn.Module, part: LoraPart, base: str | None, out: Path, reporter: Reporter
) -> None:
    """OUT/adapter, in peft's format; said where peft has no such layers."""
    left = unnameable(module)
    if left:
        reporter.warn(f"no adapter is written: peft has no layer for {', '.join(left[:3])}")
        return
    save_adapter(module, out / ADAPTER, part, base)


def write_mark(recipe: Recipe, result: RunResult, fingerprint: Mapping[str, Any]) -> None:
    """Write down that a run is finished, and with what; folders as seen from its own."""
    kept = {"best": result.best_checkpoint, "package": result.package}
    fields = {
        "config": _deciding(recipe, result.package),
        "fingerprint": {part: value for part, value in fingerprint.items() if part != "config"},
        **{k: None if p is None else os.path.relpath(p, result.out) for k, p in kept.items()},
        "tau": result.tau,
        "steps": result.steps,
        "seconds": result.seconds,
        **({} if result.suite is None else {"suite": result.suite}),
    }
    write_json(result.out / MARK, fields)


def finished_mark(
    recipe: Recipe, folder: Path, allow: Collection[str] = ()
) -> Mapping[str, Any] | None:
    """What the finished run in `folder` wrote down; None if there is something left to do. One that
    was finished under another recipe is refused, or goes on where that is allowed."""
    mark = read_mark(folder)
    if mark is None:
        return None
    now = {"config": _deciding(recipe, mark["package"])}
    return None if check_same_run(mark, now, allow) else mark


def _deciding(recipe: Recipe, package: Path | None) -> dict[str, Any]:
    """The fields of a recipe that decide what a run leaves behind."""
    return config_fields(recipe) if package is None else packaged_fields(recipe)


def finished_text(mark: Mapping[str, Any]) -> str:
    """What is said of a finished run."""
    tau = "not measured" if mark["tau"] is None else f"{mark['tau']:.3f}"
    return f"finished before, tau {tau}"


def marked_result(mark: Mapping[str, Any], recipe: Recipe, folder: Path) -> RunResult:
    """The result of a finished run."""
    return RunResult(
        folder,
        mark["best"],
        mark["tau"],
        mark["steps"],
        mark["seconds"],
        package=mark["package"],
        target=None if recipe.train.joint is None else folder / FOLDER,
        suite=mark.get("suite"),
    )


def _changes(
    mark: Mapping[str, Any],
    recipe: Recipe,
    target: Target,
    initial: Initial | None,
    ranks: Ranks,
    allow: Collection[str],
    out: Path,
) -> list[str]:
    """What has changed, on purpose, since the run was finished. Nothing is written to see it."""
    saved = mark["fingerprint"]
    now = run_fingerprint(
        recipe,
        target.fingerprint,
        target.tokenizer_fingerprint,
        rows_digest(recipe, target, out),
        saved["vocab"],  # follows from the recipe and the rows
        ranks.size,
        None if initial is None else initial.digest,
    )
    return check_same_run(saved, {part: now[part] for part in now if part in saved}, allow)


def _accelerator(settings: TrainPart, out: Path) -> Accelerator:
    """Devices, processes and trackers. Precision is the recipe's, applied by the loop itself."""
    trackers = list(settings.trackers)
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"tracker {name} is not installed",
                expected="an installed tracker of Accelerate",
                do=f"pip install {name}, or --set train.trackers=[]",
                where="train.trackers",
            )
    if not is_cpu_chosen():
        refuse_idle_cuda()
    accelerator = Accelerator(log_with=trackers or None, project_dir=str(out))
    if accelerator.distributed_type == DistributedType.FSDP and settings.parallel != "fsdp":
        raise RecipeError(
            "Accelerate was told to shard and the recipe was not",
            found=f"an FSDP configuration, train.parallel: {settings.parallel}",
            expected="the same in both",
            do="--set train.parallel=fsdp, or launch with recipes/accelerate/ddp.yaml",
            where="train.parallel",
        )
    if trackers:
        accelerator.init_trackers("specctl", init_kwargs=tracker_names(out))
    return accelerator


def tracker_names(out: Path) -> dict[str, dict[str, Any]]:
    """What trackers call a run: its folder's name. A resumed run, on whatever machines, goes on in
    the same curve at wandb, by an id that follows from where the folder is."""
    place = out.resolve()
    key = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    return {"wandb": {"name": place.name, "id": key, "resume": "allow"}}


def _check(recipe: Recipe, target: Target, initial: Initial | None) -> None:
    """Refuse a recipe that does not fit the target or the first weights."""
    check_fit(recipe.drafter, target.spec, initial)
    check_answers(recipe, target)
    suite_prompts(recipe.train, target)
    drafter = build_shape(trainable_family(recipe), recipe, target.spec)
    if recipe.train.joint is not None:
        check_target(target)
        check_joint(recipe, drafter)


def _refuse_second(checkpoints: Checkpoints) -> None:
    """With --no-resume a folder holds no run yet."""
    out = checkpoints.folder.parent
    if checkpoints.steps() or read_mark(out) is not None:
        raise FileError(
            "the run folder already holds a run",
            found=str(checkpoints.folder),
            expected="an empty folder",
            do="choose another --out, or leave --no-resume out to continue it",
            where=str(out),
        )


def _found(recipe: Recipe, checkpoints: Checkpoints, allow: Collection[str]) -> Snapshot | None:
    """The state to continue from. A changed recipe is refused here, before anything is written."""
    snapshot = checkpoints.newest(RESTART in allow)
    if snapshot is not None:
        now = {"config": config_fields(recipe), "world-size": checkpoints.ranks.size}
        check_same_run(snapshot.fingerprint, now, allow)
    return snapshot


def _load_target(recipe: Recipe, device: torch.device) -> Target:
    """The target; where its states come from outside, without its layers."""
    part = recipe.target
    if recipe.data.target_source == "inprocess":
        more = {"device": str(device), "wanted": attention_only(recipe)}
        return load_part(part, is_read_only=True, is_widened=True, **more)
    if part.inflate is not None or recipe.train.joint is not None:
        raise RecipeError(
            "this needs the target's layers in this process",
            found=f"data.target_source {recipe.data.target_source}, with "
            + ("train.joint" if part.inflate is None else "target.inflate"),
            expected="data.target_source inprocess",
            do="--set data.target_source=inprocess",
            where="data.target_source",
        )
    return load_served(part.name, revision=part.revision, dtype=part.dtype, device=str(device))


def _reference(
    recipe: Recipe, inputs: RunInputs, checkpoints: Checkpoints, allow: Collection[str]
) -> Drafter | None:
    """What the selection of tokens compares with: a drafter of a folder, or one trained first in
    OUT/reference, which a resumed run finds as it stood."""
    ranks, reporter = checkpoints.ranks, checkpoints.reporter
    stage, name = reference_stage(recipe), recipe.train.reference
    if name is not None:
        reference = loaded(name, inputs.target, inputs.load, "train.reference").to(
            ranks.device, torch.float32
        )
        if reference.needs().borrow:
            reference.bind(inputs.target.borrowed())
    elif stage is not None:
        out = checkpoints.folder.parent / "reference"
        with ranks.together():
            if ranks.is_main:
                out.mkdir(exist_ok=True)
        reporter.say(f"first the reference: {stage.train.steps:,} steps in {out}")
        places = Checkpoints(out / "checkpoints", reporter, stage.train.keep, ranks)
        job = make_job(stage, inputs, places, None)
        progress = train(job, _continue(job, places.newest(RESTART in allow), allow))
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
