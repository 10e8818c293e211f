"""Which runs and stages are finished, by the mark in the folder of each. No torch.

The mark is written last, when the package stands. A finished run is left as it is: asked for again,
it says what it found then, and neither its package nor a proof in that is touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from specctl.recipes.schema import Recipe
from specctl.train.saving.fingerprint import check_same_run, learned_fields

MARK = "finished.json"


def stage_folders(names: Iterable[str], out: Path) -> dict[str, Path]:
    """The folder of every stage of the run folder `out`."""
    return {name: out / f"stage-{i}-{name}" for i, name in enumerate(names, start=1)}


def read_mark(folder: Path) -> Mapping[str, Any] | None:
    """What the finished run in `folder` left behind, its folders as paths; None of one that has yet
    to be run, or goes on because its package was lost."""
    try:
        mark: dict[str, Any] = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    for name in ("best", "package"):
        relative = mark.get(name)
        mark[name] = None if relative is None else Path(os.path.normpath(folder / relative))
    is_lost = mark["package"] is not None and not mark["package"].exists()
    return None if is_lost else mark


def remaining(stages: Mapping[str, Recipe], out: Path) -> list[Recipe]:
    """What the same command has yet to run in `out` of a pipeline (`stages_of`). A finished stage
    is kept as it is, and needs neither its data nor its drafters again."""
    folders = stage_folders(stages, out)
    return [part for name, part in stages.items() if read_mark(folders[name]) is None]


def finished_mark(
    config: Mapping[str, Any], folder: Path, allow: Collection[str] = ()
) -> Mapping[str, Any] | None:
    """What the finished run in `folder` wrote down; None if there is something left to do. One that
    was finished under another recipe is refused, or goes on where that is allowed. `config`: the
    fields of the recipe that decide its package."""
    mark = read_mark(folder)
    if mark is None:
        return None
    now = {"config": deciding(config, mark["package"])}
    return None if check_same_run(mark, now, allow) else mark


def deciding(config: Mapping[str, Any], package: Path | None) -> Mapping[str, Any]:
    """The fields of a recipe that decide what a run leaves behind."""
    return learned_fields(config) if package is None else config


def finished_text(mark: Mapping[str, Any]) -> str:
    """What is said of a finished run."""
    tau = "not measured" if mark["tau"] is None else f"{mark['tau']:.3f}"
    return f"finished before, tau {tau}"
