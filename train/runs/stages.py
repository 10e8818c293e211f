"""A pipeline: the stages of a recipe as runs of their own, each from the weights of the one before.

OUT/run.yaml            the whole recipe, its origin, the command
OUT/stage-1-NAME        an ordinary run folder, and so on; a finished one holds finished.json
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

from specctl.recipes.load import build_recipe
from specctl.recipes.schema import Recipe
from specctl.recipes.stages import resolved, stages_of
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.rows.context import check_context
from specctl.train.init.initial import Loader
from specctl.train.joint.check import check_stages
from specctl.train.planning.capacity import lacking_disk, refuse_lacks
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.plan import Calibrate, RunPlan, disk_needs, plan
from specctl.train.planning.target_shape import target_shape
from specctl.train.run import (
    Packager,
    RunResult,
    marked_result,
    train_draft,
)
from specctl.train.runs.finished import finished_mark, finished_text, stage_folders
from specctl.train.saving.fingerprint import config_fields
from specctl.train.saving.run_file import write_run_file


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline: its name, its folder, its recipe with folders filled in."""

    name: str
    folder: Path
    recipe: Recipe

    def fields(self) -> dict[str, Any]:
        """Those of its recipe that decide its package."""
        return config_fields(self.recipe, is_packaged=True)


def stages(found: Mapping[str, Recipe], out: Path) -> list[Stage]:
    """The stages of a pipeline (`stages_of`) under its run folder `out`, in order."""
    check_stages([part.train.joint for part in found.values()])
    folders = stage_folders(found, out)
    names = {name: str(folder) for name, folder in folders.items()}
    made = list[Stage]()
    for name, part in found.items():
        tree = resolved(part.to_json(), names)
        recipe = build_recipe(tree, part.name).with_origin(part.origin)
        made.append(Stage(name, folders[name], recipe))
    return made


def plans(
    runs: Sequence[tuple[Recipe, Path]],
    cluster: Cluster | None = None,
    calibrate: Calibrate | None = None,
) -> list[tuple[Recipe, RunPlan]]:
    """The plan of each run, by its recipe and folder. `calibrate` as in `plan`."""
    return [
        (part, plan(part, out=folder, cluster=cluster, calibrate=calibrate))
        for part, folder in runs
    ]


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
    todo = stages(stages_of(recipe), out)
    for stage in todo:
        part = stage.recipe
        check_context(part.target.name, part.data, part.train.seq_len, spec)
    is_main = PartialState().is_main_process
    talker = (reporter or SilentReporter()) if is_main else SilentReporter()
    left = [stage for stage in todo if finished_mark(stage.fields(), stage.folder, allow) is None]
    if left:
        room = [(stage.folder, disk_needs(stage.recipe, spec)) for stage in left]
        refuse_lacks(lacking_disk(room), "what the stages will write", out)
    if is_main:
        out.mkdir(parents=True, exist_ok=True)
        write_run_file(recipe, out, command)
    results: list[RunResult] = []
    for number, stage in enumerate(todo, start=1):
        is_last = stage is todo[-1]
        mark = finished_mark(stage.fields(), stage.folder, allow) if resume else None
        title = f"stage {number} of {len(todo)}, {stage.name}"
        if mark is not None:
            talker.say(f"{title}: {finished_text(mark)}")
            results.append(marked_result(mark, stage.recipe.train.joint, stage.folder))
            continue
        talker.say(title)
        result = train_draft(
            stage.recipe,
            stage.folder,
            reporter=reporter,
            package=package,
            package_folder=out / "package" if is_last else None,
            target=target,
            **given,
        )
        results.append(result)
    return replace(
        results[-1],
        out=out,
        steps=sum(result.steps for result in results),
        seconds=sum(result.seconds for result in results),
    )
