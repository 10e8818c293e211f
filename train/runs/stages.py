"""A pipeline: the stages of a recipe as runs of their own, each from the weights of the one before.

OUT/run.yaml            the whole recipe, its origin, the command
OUT/stage-1-NAME        an ordinary run folder, and so on; a finished stage holds stage.json
OUT/package             the last stage's drafter

A stopped pipeline continues with the same command: finished stages are kept as they are, the one
that was running resumes. FastDraft (arXiv 2411.11055, section 3) is such a pipeline: pre-train on
text, continue on code and text, align on answers of the target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from specctl.core.drafter import Drafter
from specctl.recipes.schema import Recipe
from specctl.recipes.stages import resolved, stages_of
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.context import check_context
from specctl.train.init.initial import Loader
from specctl.train.joint.check import check_stages
from specctl.train.joint.joint_target import FOLDER
from specctl.train.planning.plan import RunPlan, plan
from specctl.train.planning.target_shape import target_shape
from specctl.train.run import Packager, RunResult, train_draft
from specctl.train.runs.finished import MARK, read_mark, stage_folders
from specctl.train.saving.fingerprint import check_same_run, config_fields
from specctl.train.saving.run_file import write_run_file
from specctl.train.saving.store import write_json


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline: its name, its folder, its recipe with folders filled in."""

    name: str
    folder: Path
    recipe: Recipe


def stages(recipe: Recipe, out: Path) -> list[Stage]:
    """The stages of a recipe under the run folder `out`, in order."""
    found = stages_of(recipe)
    check_stages([*found.values()])
    folders = stage_folders(found, out)
    names = {name: str(folder) for name, folder in folders.items()}
    return [Stage(name, folders[name], resolved(part, names)) for name, part in found.items()]


def plans(recipe: Recipe, out: Path) -> list[tuple[Recipe, RunPlan]]:
    """The plan of a recipe; of a pipeline, one for each stage."""
    if not recipe.stages:
        return [(recipe, plan(recipe, out=out))]
    return [(s.recipe, plan(s.recipe, out=s.folder)) for s in stages(recipe, out)]


def train_recipe(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = True,
    reporter: Reporter | None = None,
    command: Sequence[str] = (),
    allow: Collection[str] = (),
    package: Packager | None = None,
    load: Loader | None = None,
    target: Target | None = None,
) -> RunResult:
    """`train_draft`, or every stage of a pipeline one after another (see there for the arguments).

    Returns what the last stage left behind, with the steps and seconds of all of them.
    """
    given: dict[str, Any] = {"resume": resume, "command": command, "allow": allow, "load": load}
    if not recipe.stages:
        return train_draft(recipe, out, reporter=reporter, package=package, target=target, **given)
    spec = target_shape(recipe.target).spec if target is None else target.spec
    todo = stages(recipe, out)
    for stage in todo:
        check_context(stage.recipe, spec)
    is_main = PartialState().is_main_process
    talker = (reporter or SilentReporter()) if is_main else SilentReporter()
    if is_main:
        out.mkdir(parents=True, exist_ok=True)
        write_run_file(recipe, out, command)
    results: list[RunResult] = []
    for number, stage in enumerate(todo, start=1):
        is_last = stage is todo[-1]
        done = finished(stage, allow) if resume else None
        title = f"stage {number} of {len(todo)}, {stage.name}"
        if done is not None:
            talker.say(f"{title}: finished before, tau {done.tau}")
            results.append(done)
            continue
        talker.say(title)
        write = _into(package, out / "package") if is_last else package
        result = train_draft(
            stage.recipe, stage.folder, reporter=reporter, package=write, target=target, **given
        )
        if is_last and package is not None:
            result = replace(result, package=out / "package")
        if is_main:
            mark_finished(stage, result)
        results.append(result)
    return replace(
        results[-1],
        out=out,
        steps=sum(result.steps for result in results),
        seconds=sum(result.seconds for result in results),
    )


def finished(stage: Stage, allow: Collection[str] = ()) -> RunResult | None:
    """What a finished stage left behind; None if it has yet to be run. A stage that was finished
    under another recipe is refused."""
    mark = read_mark(stage.folder)
    if mark is None:
        return None
    check_same_run(mark, {"config": config_fields(stage.recipe)}, allow)
    best, package = (None if mark[k] is None else Path(mark[k]) for k in ("best", "package"))
    changed = None if stage.recipe.train.joint is None else stage.folder / FOLDER
    return RunResult(
        stage.folder,
        best,
        mark["tau"],
        mark["steps"],
        mark["seconds"],
        package=package,
        target=changed,
    )


def mark_finished(stage: Stage, result: RunResult) -> None:
    """Write down that a stage is finished, and with what; `finished` reads it."""
    best, package = result.best_checkpoint, result.package
    write_json(
        stage.folder / MARK,
        {
            "config": config_fields(stage.recipe),
            "best": None if best is None else str(best),
            "package": None if package is None else str(package),
            "tau": result.tau,
            "steps": result.steps,
            "seconds": result.seconds,
        },
    )


def _into(package: Packager | None, folder: Path) -> Packager | None:
    """A packager that writes to `folder`, whatever it is asked."""
    if package is None:
        return None

    def write(
        drafter: Drafter, target: Target, asked: Path, acceptance: Mapping[str, Any] | None
    ) -> object:
        del asked
        return package(drafter, target, folder, acceptance)

    return write
