"""A drafter of every shape, cut out of the target and healed for a few steps, in OUT/LxW."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.drafter import Drafter
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.assemble import measuring_prompts
from specctl.train.data.prepare import prepare
from specctl.train.init.initial import checkpoint_drafter
from specctl.train.planning.plan import plan
from specctl.train.planning.work import ANSWERS
from specctl.train.prune.cut import prunable
from specctl.train.prune.shapes import DraftShape
from specctl.train.run import train_draft
from specctl.train.saving.integrity import step_name


def quick_recipe(recipe: Recipe, options: Mapping[str, Any], steps: int) -> Recipe:
    """The recipe for one shape: cut from the target, healed briefly."""
    kept = {k: v for k, v in recipe.drafter.options.items() if k != "from_layers"}
    part = recipe.drafter.model_copy(update={"init": "target", "options": {**kept, **options}})
    train = recipe.train.model_copy(update={"steps": steps, "tau_every": steps})
    return recipe.model_copy(update={"drafter": part, "train": train})


def healed(
    recipe: Recipe,
    target: Target,
    shapes: Sequence[DraftShape],
    out: Path,
    steps: int,
    reporter: Reporter,
) -> Iterator[tuple[DraftShape, Drafter]]:
    """Each shape and its drafter, as soon as it is healed, in the target's dtype. All share the
    rows that the first prepares; runs that are there go on where they stopped."""
    base, first = prunable(target).module.shape, out / shapes[0].name / "data"
    for number, shape in enumerate(shapes, start=1):
        folder = out / shape.name
        if number > 1 and not (folder / "data").exists():
            shutil.copytree(first, folder / "data")
        reporter.say(f"shape {number} of {len(shapes)}: {shape.name} healed for {steps:,} steps")
        given = quick_recipe(recipe, shape.options(base), steps)
        train_draft(given, folder, target=target, reporter=reporter)
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


def plan_healing(
    recipe: Recipe, target: Target, shapes: Sequence[DraftShape], out: Path, steps: int
) -> HealingPlan:
    """What `healed` will take, by the plan of each run; the text is made once."""
    base = prunable(target).module.shape
    left = [s for s in shapes if not (out / s.name / "checkpoints" / step_name(steps)).exists()]
    plans = [plan(quick_recipe(recipe, s.options(base), steps), target.spec) for s in left]
    parts = [
        part
        for number, made in enumerate(plans)
        for part in made.parts
        if number == 0 or part.name != ANSWERS
    ]
    least, most = (sum(part.seconds_range[i] for part in parts) for i in (0, 1))
    return HealingPlan(len(left), least, most)


def judging_prompts(
    recipe: Recipe, target: Target, folder: Path, count: int
) -> list[Sequence[int]]:
    """What acceptance is measured on: `count` prompts of the kind that the run in the folder
    measures tau on."""
    train = recipe.train.model_copy(update={"tau_prompts": count})
    more = recipe.model_copy(update={"train": train})
    return list(measuring_prompts(more, target, prepare(recipe, target, folder)))
