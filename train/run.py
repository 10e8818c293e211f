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

from specctl.core.device.kept_memory import kept_memory
from specctl.core.drafter import Drafter
from specctl.core.errors import FileError, IntegrityError, RecipeError
from specctl.core.forward.attention_only import AttentionOnly
from specctl.core.storage.files import write_json
from specctl.recipes.low_rank import JointPart, LoraPart
from specctl.recipes.schema import DataPart, Recipe, TargetPart, TrainPart
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.placement.device import refuse_idle_cuda, slow_dtype
from specctl.runtime.target.served import ServedLM, load_served
from specctl.runtime.target.target import Target, load_part
from specctl.train.assemble import attention_only, check_answers, served_family, trainable_family
from specctl.train.data.images.image_checks import runs_layers, shows_images
from specctl.train.data.preparation import Preparation
from specctl.train.data.prepare import prepare, rows_digest
from specctl.train.data.prompts.suite_prompts import suite_prompts
from specctl.train.data.rows.growth import LearnedRows
from specctl.train.distributed.in_step import check_spread, in_step
from specctl.train.distributed.ranks import Ranks
from specctl.train.distributed.run_device import is_cpu_chosen
from specctl.train.distributed.sharding import shard_target
from specctl.train.init.axes import with_axes
from specctl.train.init.initial import Initial, Loader, check_fit, initial_of, loaded
from specctl.train.job import RunInputs, make_job
from specctl.train.joint.check import check_joint, check_target
from specctl.train.joint.joint import JointModel
from specctl.train.joint.joint_target import (
    FOLDER,
    held_out,
    log_change,
    save_joint_target,
    say_change,
)
from specctl.train.loop import Job, TrainProgress, measure, restore, train
from specctl.train.metrics.metrics import read_log
from specctl.train.metrics.overfitting import overfitting
from specctl.train.metrics.plot import save_learning_curve
from specctl.train.planning.capacity import lacking_disk, refuse_lacks
from specctl.train.planning.plan import RunPlan, build_shape, disk_needs, plan
from specctl.train.runs.finished import MARK, deciding, finished_mark, finished_text, read_mark
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.fingerprint import (
    RESTART,
    check_same_run,
    config_fields,
    learned_fields,
    run_fingerprint,
)
from specctl.train.saving.lock import locked
from specctl.train.saving.run_file import RECORD, write_run_file
from specctl.train.step.lora import ADAPTER, merge, save_adapter, unnameable
from specctl.train.step.optim import RecipeSchedule
from specctl.train.step.selective import reference_part
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
    served_family(recipe.drafter, recipe.train.joint, recipe.serve)
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
        fields = config_fields(recipe, is_packaged=True)
        mark = finished_mark(fields, out, allow)
        if mark is not None and mark["package"] is None:
            mark = None  # its checkpoints are all it left; there is no package to leave alone
        snapshot = None if mark is not None else _found(fields, checkpoints, allow)
        check_spread(recipe.target, recipe.data, recipe.train, ranks.size)
        is_elsewhere = recipe.data.target_source != "inprocess"
        parts = recipe.data, recipe.train, recipe.drafter, recipe.target
        images = shows_images(*parts, target, ranks.size)
        if target is None or (is_elsewhere and not isinstance(target.lm, ServedLM)):
            if is_elsewhere:
                _refuse_elsewhere(recipe.target, recipe.data, recipe.train.joint)
            wanted = attention_only(recipe.drafter, recipe.serve)
            target = _load_target(recipe.target, is_elsewhere, wanted, accelerator.device, images)
            _say_target(target, talker)
        if (slow := slow_dtype(target.dtype, target.device)) is not None:
            talker.warn(f"{slow}: --set target.dtype=auto computes in float32")
        target = in_step(recipe.target, target, ranks)
        # what this refuses, before answers are written
        initial = initial_of(recipe.drafter, target, load)
        if mark is not None:
            made = Preparation(recipe.data, recipe.train.seq_len, target, recipe.target)
            rows = rows_digest(made, out)
            if not _changes(mark, learned_fields(fields), target, rows, initial, ranks, allow):
                talker.say(f"{finished_text(mark)}: {out} is left as it is")
                accelerator.end_training()
                return marked_result(mark, recipe.train.joint, out)
            snapshot = _found(fields, checkpoints, allow)
        _check(recipe, target, initial, images)
        with ranks.together():
            if ranks.is_main:
                room = [(out, disk_needs(recipe, target.spec))]
                refuse_lacks(lacking_disk(room), "what the run will write", out)
        begin = partial(_begin, out, partial(write_run_file, recipe, out, command), ranks)
        if snapshot is None:
            begin()
        learned = _learned(recipe.train.steps, snapshot, allow, begin)
        data = prepare(recipe, target, out, talker, ranks, learned)
        target = shard_target(recipe.train, recipe.data, target, ranks)
        inputs = RunInputs(target, data, initial, stop, accelerator, load)

        def reference_job(part: TrainPart, places: Checkpoints) -> Job:
            return make_job(recipe.model_copy(update={"train": part}), inputs, places, None)

        reference = _reference(recipe.train, inputs, checkpoints, allow, reference_job)
        stop.is_deferred = False  # features that are read keep what is finished
        job = make_job(recipe, inputs, checkpoints, reference)
        progress = _continue(job, snapshot, allow)
        job = replace(job, schedule=RecipeSchedule(recipe.train, progress.began))
        progress = train(job, progress)
        acceptance = _best(job, progress, talker)
        place = None if package is None else package_folder or out / "package"
        result = _result(job, progress, acceptance, place)
        with job.drafter.whole() as drafter, ranks.together():
            if ranks.is_main:
                target = _save_results(drafter, job, inputs, recipe.data, result)
                if package is not None and result.package is not None:
                    package(drafter, target, result.package, acceptance)
                write_mark(fields, result, job.fingerprint)
        accelerator.end_training()
    return result


def _result(
    job: Job, progress: TrainProgress, acceptance: Mapping[str, Any] | None, package: Path | None
) -> RunResult:
    """What the run has come to, before it is written."""
    return RunResult(
        out=job.out,
        best_checkpoint=None
        if progress.best_step is None
        else job.checkpoints.path(progress.best_step),
        tau=None if acceptance is None else acceptance["tau"],
        steps=progress.step,
        seconds=progress.seconds,
        package=package,
        target=None if job.settings.joint is None else job.out / FOLDER,
        suite=None if acceptance is None else acceptance.get("suite"),
    )


def _begin(out: Path, write: Callable[[], None], ranks: Ranks) -> None:
    """Write down that the folder holds this run, and that it is not finished."""
    if ranks.is_main:
        (out / MARK).unlink(missing_ok=True)
        write()


def _learned(
    steps: int, snapshot: Snapshot | None, allow: Collection[str], begin: Callable[[], None]
) -> LearnedRows | None:
    """What the run has made of its rows; None of one that is at its beginning."""
    if snapshot is None:
        return None
    digest = snapshot.fingerprint.get("data")
    return LearnedRows(digest, snapshot.step, steps, "data" in allow, begin)


def _save_results(
    drafter: Drafter, job: Job, inputs: RunInputs, part: DataPart, result: RunResult
) -> Target:
    """Write the results of a run: its curve, its additions, the changed target; returns the target
    that the drafter is for."""
    out, target, log = result.out, inputs.target, result.out / "metrics.jsonl"
    save_learning_curve(log, out / "curve.png")
    if log.exists() and (learned := overfitting(list(read_log(log)))) is not None:
        job.reporter.warn(learned)
    adapted = drafter.module
    lora = job.settings.lora
    if lora is not None and adapted is not None:
        if lora.keep:
            base = None if inputs.initial is None else inputs.initial.name
            _save_additions(adapted, lora, base, out, job.reporter)
        merge(adapted)
    if isinstance(job.drafter, JointModel):
        texts = held_out(part, job.settings.seq_len, target, inputs.data)
        target = save_joint_target(job.drafter, target, texts, out)
        say_change(target, out / FOLDER, job.reporter)
        log_change(target, job.log, result.steps)
    return target


def _save_additions(
    module: nn.Module, part: LoraPart, base: str | None, out: Path, reporter: Reporter
) -> None:
    """OUT/adapter, in peft's format; said where peft has no such layers."""
    left = unnameable(module)
    if left:
        reporter.warn(f"no adapter is written: peft has no layer for {', '.join(left[:3])}")
        return
    save_adapter(module, out / ADAPTER, part, base)


def write_mark(
    config: Mapping[str, Any], result: RunResult, fingerprint: Mapping[str, Any]
) -> None:
    """Write down that a run is finished, and with what; folders as seen from its own. `config`: the
    fields that decide its package."""
    kept = {"best": result.best_checkpoint, "package": result.package}
    fields = {
        "config": deciding(config, result.package),
        "fingerprint": {part: value for part, value in fingerprint.items() if part != "config"},
        **{k: None if p is None else os.path.relpath(p, result.out) for k, p in kept.items()},
        "tau": result.tau,
        "steps": result.steps,
        "seconds": result.seconds,
        **({} if result.suite is None else {"suite": result.suite}),
    }
    write_json(result.out / MARK, fields)


def marked_result(mark: Mapping[str, Any], joint: JointPart | None, folder: Path) -> RunResult:
    """The result of a finished run; by `joint` it changed its target."""
    return RunResult(
        folder,
        mark["best"],
        mark["tau"],
        mark["steps"],
        mark["seconds"],
        package=mark["package"],
        target=None if joint is None else folder / FOLDER,
        suite=mark.get("suite"),
    )


def _changes(
    mark: Mapping[str, Any],
    config: Mapping[str, Any],
    target: Target,
    rows: str,
    initial: Initial | None,
    ranks: Ranks,
    allow: Collection[str],
) -> list[str]:
    """What has changed, on purpose, since the run was finished. Nothing is written to see it.
    `rows`: the digest of those that the run would have."""
    saved = mark["fingerprint"]
    now = run_fingerprint(
        config,
        target.fingerprint,
        target.tokenizer_fingerprint,
        rows,
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


def _check(recipe: Recipe, target: Target, initial: Initial | None, images: bool) -> None:
    """Refuse a recipe that does not fit the target, the first weights or the data's images."""
    check_fit(recipe.drafter, target.spec, initial)
    check_answers(recipe.data, target)
    suite_prompts(recipe.train, target)
    part, joint = with_axes(recipe.drafter, target, images), recipe.train.joint
    drafter = build_shape(trainable_family(part, joint), part, recipe.vocab.size, target.spec)
    if images and drafter.runs_target:
        raise runs_layers(drafter.family)
    if recipe.train.joint is not None:
        check_target(target)
        check_joint(recipe.data, recipe.train, recipe.target, drafter)


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


def _found(
    fields: Mapping[str, Any], checkpoints: Checkpoints, allow: Collection[str]
) -> Snapshot | None:
    """The state to continue from. A recipe whose fields have changed is refused here, before
    anything is written."""
    snapshot = checkpoints.newest(RESTART in allow)
    if snapshot is not None:
        now = {"config": learned_fields(fields), "world-size": checkpoints.ranks.size}
        check_same_run(snapshot.fingerprint, now, allow)
    return snapshot


def _load_target(
    part: TargetPart,
    is_elsewhere: bool,
    wanted: Sequence[AttentionOnly],
    device: torch.device,
    images: bool = False,
) -> Target:
    """The target; where its states come from outside, without its layers; with its vision where the
    data hold `images`."""
    if is_elsewhere:
        return load_served(part.name, revision=part.revision, dtype=part.dtype, device=str(device))
    more: dict[str, Any] = {"device": str(device), "wanted": wanted, "images": images}
    return load_part(part, is_read_only=True, is_widened=True, **more)


def _refuse_elsewhere(part: TargetPart, data: DataPart, joint: JointPart | None) -> None:
    """Refuse to change a target whose layers are not in this process."""
    if part.inflate is not None or joint is not None:
        raise RecipeError(
            "this needs the target's layers in this process",
            found=f"data.target_source {data.target_source}, with "
            + ("train.joint" if part.inflate is None else "target.inflate"),
            expected="data.target_source inprocess",
            do="--set data.target_source=inprocess",
            where="data.target_source",
        )


def _say_target(target: Target, reporter: Reporter) -> None:
    """Notes on a target that was loaded, and how it is spread."""
    for note in target.notes:
        reporter.say(f"note: {note}")
    if target.spread is not None:
        reporter.say(f"target {target.name}: {target.spread}; its forward is transformers'")


def _reference(
    train_part: TrainPart,
    inputs: RunInputs,
    checkpoints: Checkpoints,
    allow: Collection[str],
    job_of: Callable[[TrainPart, Checkpoints], Job],
) -> Drafter | None:
    """What the selection of tokens compares with: a drafter of a folder, or one trained first in
    OUT/reference by `job_of`, which a resumed run finds as it stood."""
    ranks, reporter = checkpoints.ranks, checkpoints.reporter
    stage, name = reference_part(train_part), train_part.reference
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
        reporter.say(f"first the reference: {stage.steps:,} steps in {out}")
        places = Checkpoints(out / "checkpoints", reporter, stage.keep, ranks)
        job = job_of(stage, places)
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
