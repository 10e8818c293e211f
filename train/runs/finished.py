"""Which runs and stages are finished, by the mark in the folder of each. No torch.

The mark is written last, when the package stands. A finished run is left as it is: asked for again,
it says what it found then, and neither its package nor a proof in that is touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specctl.recipes.schema import Recipe
from specctl.recipes.stages import stages_of

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


def remaining(recipe: Recipe, out: Path) -> list[Recipe]:
    """What the same command has yet to run in `out`: the unfinished stages, or the recipe itself.
    A finished stage is kept as it is, and needs neither its data nor its drafters again."""
    if not recipe.stages:
        return [recipe]
    folders = stage_folders(recipe.stages, out)
    return [part for name, part in stages_of(recipe).items() if read_mark(folders[name]) is None]
