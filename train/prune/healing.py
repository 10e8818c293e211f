"""A drafter of every shape, cut out of the target and healed for a few steps, in OUT/LxW."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.core.drafter import Drafter
from specctl.models.llama.llama import LlamaShape
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.init.initial import checkpoint_drafter
from specctl.train.planning.plan import plan
from specctl.train.planning.work import ANSWERS
from specctl.train.prune.shapes import DraftShape
from specctl.train.run import train_draft
from specctl.train.saving.integrity import step_name

Healings = Mapping[DraftShape, Recipe]  # how each shape is cut from the target and healed


def healings(
    recipe: Recipe, shapes: Sequence[DraftShape], base: LlamaShape, steps: int
) -> Healings:
    """The recipes of shapes cut from a target of shape `base`, each healed for so many steps."""
    kept = {k: v for k, v in recipe.drafter.options.items() if k != "from_layers"}
    train = recipe.train.model_copy(update={"steps": steps, "tau_every": steps})
    found: dict[DraftShape, Recipe] = {}
    for shape in shapes:
        options = {**kept, **shape.options(base)}
        part = recipe.drafter.model_copy(update={"init": "target", "options": options})
        found[shape] = recipe.model_copy(update={"drafter": part, "train": train})
    return found


def healed(
    runs: Healings, target: Target, out: Path, reporter: Reporter
) -> Iterator[tuple[DraftShape, Drafter]]:
    """Each shape and its drafter, as soon as it is healed, in the target's dtype. All share the
    rows that the first prepares; runs that are there go on where they stopped."""
    first = out / next(iter(runs)).name / "data"
    for number, (shape, recipe) in enumerate(runs.items(), start=1):
        folder = out / shape.name
        if number > 1 and not (folder / "data").exists():
            shutil.copytree(first, folder / "data")
        steps = recipe.train.steps
        reporter.say(f"shape {number} of {len(runs)}: {shape.name} healed for {steps:,} steps")
        train_draft(recipe, folder, target=target, reporter=reporter)
        drafter = checkpoint_drafter(folder, target).to(target.device, target.dtype)
        assert drafter.module is not None
        drafter.module.eval()
        yield shape, drafter


@dataclass(frozen=True, slots=True)
class HealingPlan:
    """How many shapes are still to be healed, and the least and most seconds that may take."""

    shapes: int
    least: float
    most: float


def plan_healing(runs: Healings, target: Target, out: Path) -> HealingPlan:
    """What `healed` will take, by the plan of each run; the text is made once."""
    left = [run for shape, run in runs.items() if not _is_healed(out / shape.name, run.train.steps)]
    plans = [plan(run, target.spec) for run in left]
    parts = [
        part
        for number, made in enumerate(plans)
        for part in made.parts
        if number == 0 or part.name != ANSWERS
    ]
    least, most = (sum(part.seconds_range[i] for part in parts) for i in (0, 1))
    return HealingPlan(len(left), least, most)


def _is_healed(run: Path, steps: int) -> bool:
    return (run / "checkpoints" / step_name(steps)).exists()
