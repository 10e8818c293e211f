"""`specctl plan`: what a recipe will take, before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.console import Console
from specctl.cli.memory import size_text
from specctl.cli.progress import duration
from specctl.cli.recipe_flags import RecipeFlags
from specctl.cli.scaling import plan_scaling
from specctl.recipes.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.train.plan import Plan


def plan(
    console: Console,
    run: RecipeFlags,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Run five steps apart first, and measure instead."),
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="Train the recipe's grid, and price the next 0.1 of tau."),
    ] = False,
) -> None:
    """Show parameters, memory, disk and time of a training run. Nothing is loaded or written.

    Memory and time are estimates. With --rehearse the target is loaded and a small run made in a
    process and a folder of its own, so that both are measured; after twenty steps of a run in OUT
    its time is measured there. With --scaling a grid of small runs is trained in OUT (the same
    command continues it), the law of tau against tokens and size is fitted, and what more of
    either would bring is told.

    Examples:

      specctl plan --recipe eagle3 --target tiny
      specctl plan --recipe eagle3 --target tiny --rehearse
      specctl plan --scaling --recipe scaling --out runs/scaling
      specctl plan --recipe medusa --set train.steps=2000 --json
    """
    loaded = run.load()
    if scaling:
        plan_scaling(console, loaded, run.folder(loaded))
        return
    result = show_plans(console, loaded, run.folder(loaded), rehearse)
    chosen = "" if run.target is None else f" --target {run.target}"
    console.done(result, next=[f"specctl train-draft --recipe {run.recipe}{chosen}"])


def show_plans(
    console: Console, recipe: Recipe, out: Path, is_rehearsed: bool = False
) -> dict[str, Any]:
    """The plan of a run, or of each stage of a pipeline; returns them for --json."""
    from specctl.train.assemble import trainable_family
    from specctl.train.stages import plans

    trainable_family(recipe)
    made = plans(recipe, out)
    if is_rehearsed:
        made = [(recipe, _rehearsed(console, recipe))]
    for part, plan in made:
        show_plan(console, part, plan)
    answer: dict[str, Any] = {"recipe": recipe.to_json(), "origin": recipe.origin}
    if not recipe.stages:
        return answer | {"plan": made[0][1].to_json()}
    low, high = (sum(plan.seconds_range[i] for _, plan in made) for i in (0, 1))
    console.out(f"all {len(made)} stages: {duration(low)} to {duration(high)}")
    return answer | {"plans": {part.name: plan.to_json() for part, plan in made}}


def _rehearsed(console: Console, recipe: Recipe) -> Plan:
    """The plan of a run after its rehearsal."""
    from specctl.cli.rehearse import rehearse
    from specctl.train.plan import plan

    if recipe.stages:
        raise SpecctlError(
            "a pipeline cannot be rehearsed: its later stages start from the earlier ones",
            found=f"{len(recipe.stages)} stages",
            expected="a recipe of one stage",
            do="leave --rehearse out, or plan one stage as a recipe of its own",
        )
    console.say("rehearsing: a small run in a process of its own, a minute or two")
    return plan(recipe, rehearsal=rehearse(recipe))


def show_plan(console: Console, recipe: Recipe, plan: Plan) -> None:
    """What a run will take, before anything is spent."""
    low, high = plan.seconds_range
    rows = [
        ("recipe", f"{recipe.name} ({recipe.digest[:12]})"),
        ("target", recipe.target.name),
        ("family", recipe.drafter.family),
        ("target parameters", f"{plan.target_parameters:,}"),
        ("drafter parameters", f"{plan.parameters:,} ({plan.trainable:,} trained)"),
        ("steps", f"{plan.steps:,}"),
        ("memory", _parts_text(plan.memory_bytes, plan.memory)),
        ("disk", _parts_text(plan.disk_bytes, plan.disk)),
        ("time", f"{duration(low)} to {duration(high)} ({plan.basis})"),
    ]
    console.table(("what", "how much"), rows)


def _parts_text(total: int, parts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {size_text(count)}" for name, count in parts.items())
    return f"{size_text(total)} ({shown})"
