"""`specctl plan`: what a recipe will take, before anything is spent."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.api.preflight import check_out, check_run
from specctl.cli.app.console import Console
from specctl.cli.app.memory import size_text
from specctl.cli.app.progress import duration
from specctl.cli.commands.scaling import plan_scaling
from specctl.cli.options.flags import Offline
from specctl.cli.options.recipe_flags import RecipeFlags
from specctl.cli.options.target_choice import go_offline
from specctl.core.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.train.planning.capacity import Lack
    from specctl.train.planning.plan import RunPlan
    from specctl.train.planning.work import Part


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
    offline: Offline = False,
) -> None:
    """Show parameters, memory, disk and time of a training run. Nothing is loaded or written.

    A plan that this machine or its GPU cannot hold ends with exit code 6. Memory and time are
    estimates. With --rehearse the target is loaded and a small run made in a process and a folder
    of its own, so that both are measured; after twenty steps of a run in OUT its time is measured
    there. With --scaling a grid of small runs is trained in OUT (the same command continues it),
    the distribution of tau against tokens and size is fitted, and what more of either would bring
    is told.

    Examples:

      specctl plan --recipe eagle3 --target tiny
      specctl plan --recipe eagle3 --target tiny --rehearse
      specctl plan --scaling --recipe scaling --out runs/scaling
      specctl plan --recipe medusa --set train.steps=2000 --json
    """
    loaded = run.load()
    if rehearse and scaling:
        raise SpecctlError(
            "one plan is either rehearsed or fitted to a grid of runs",
            where="the command line",
            found="--rehearse --scaling",
            expected="one of the two",
            do="leave --rehearse out",
        )
    if offline:
        go_offline()
    if scaling:
        plan_scaling(console, loaded, run.folder(loaded))
        return
    check_out(run.folder(loaded))
    check_run(loaded, run.folder(loaded), None if rehearse else console.warn)
    result = show_plans(console, loaded, run.folder(loaded), rehearse)
    chosen = "" if run.target is None else f" --target {run.target}"
    console.done(result, next=[f"specctl train-draft --recipe {run.recipe}{chosen}"])


def show_plans(
    console: Console, recipe: Recipe, out: Path, is_rehearsed: bool = False
) -> dict[str, Any]:
    """The plan of a run, or of each stage of a pipeline; returns them for --json, or raises once
    they are shown if they do not fit here."""
    from specctl.train.assemble import trainable_family
    from specctl.train.runs.stages import plans

    trainable_family(recipe)
    made = plans(recipe, out)
    if is_rehearsed:
        made = [(recipe, _rehearsed(console, recipe))]
    return shown(console, recipe, made, out)


def shown(
    console: Console, recipe: Recipe, made: Sequence[tuple[Recipe, RunPlan]], out: Path
) -> dict[str, Any]:
    """One plan, or those of several stages and what they come to. ResourceError (exit 6), with all
    that was shown, if memory or disk of this machine cannot hold it."""
    from specctl.train.planning.capacity import refuse_lacks

    answer, lacks = _shown(console, recipe, made), _lacks(recipe, made, out)
    answer |= {"fits": not lacks, "lacks": [lack.to_json() for lack in lacks]}
    console.result = answer
    refuse_lacks(lacks, "what was planned", out)
    return answer


def _lacks(recipe: Recipe, made: Sequence[tuple[Recipe, RunPlan]], out: Path) -> list[Lack]:
    """What this machine has too little of: memory for any stage, disk for all of them."""
    from specctl.train.planning.capacity import lacking_disk, lacking_memory
    from specctl.train.runs.finished import stage_folders

    folders = [*stage_folders(recipe.stages, out).values()] or [out] * len(made)
    lacks = lacking_disk([(f, plan.disk) for f, (_, plan) in zip(folders, made, strict=True)])
    largest, plan = max(made, key=lambda one: one[1].memory_bytes)
    is_spread = largest.train.parallel == "fsdp" or largest.train.shard_target
    return [*lacking_memory(plan.memory, is_spread), *lacks]


def _shown(
    console: Console, recipe: Recipe, made: Sequence[tuple[Recipe, RunPlan]]
) -> dict[str, Any]:
    for part, plan in made:
        show_plan(console, part, plan)
    answer: dict[str, Any] = {"recipe": recipe.to_json(), "origin": recipe.origin}
    if len(made) == 1:
        return answer | {"plan": made[0][1].to_json()}
    named = _named(made)
    low, high = (sum(plan.seconds_range[i] for plan in named.values()) for i in (0, 1))
    disk = sum(plan.disk_bytes for plan in named.values())
    console.out(
        f"all {len(made)} stages: {duration(low)} to {duration(high)}, {size_text(disk)} on disk"
    )
    return answer | {
        "plans": {name: plan.to_json() for name, plan in named.items()},
        "total": {
            "steps": sum(plan.steps for plan in named.values()),
            "seconds_range": [low, high],
            "disk_bytes": disk,
            "memory_bytes": max(plan.memory_bytes for plan in named.values()),
        },
    }


def without_dry_run() -> str:
    """The command that was given, as the one that does it."""
    left_out = ("--dry-run", "--json", "--jsonl")
    return shlex.join(["specctl", *(word for word in sys.argv[1:] if word not in left_out)])


def _named(made: Sequence[tuple[Recipe, RunPlan]]) -> dict[str, RunPlan]:
    """Plans by the name of their recipe; of one recipe several times, numbered."""
    names = [part.name for part, _ in made]
    if len({*names}) < len(names):
        names = [f"{name}-{number}" for number, name in enumerate(names, 1)]
    return dict(zip(names, (plan for _, plan in made), strict=True))


def _rehearsed(console: Console, recipe: Recipe) -> RunPlan:
    """The plan of a run after its rehearsal."""
    from specctl.cli.commands.rehearse import rehearse
    from specctl.train.planning.plan import plan

    if recipe.stages:
        raise SpecctlError(
            "a pipeline cannot be rehearsed: its later stages start from the earlier ones",
            found=f"{len(recipe.stages)} stages",
            expected="a recipe of one stage",
            do="leave --rehearse out, or plan one stage as a recipe of its own",
        )
    console.say("rehearsing: a small run in a process of its own, a minute or two")
    return plan(recipe, rehearsal=rehearse(recipe))


def show_plan(console: Console, recipe: Recipe, plan: RunPlan) -> None:
    """What a run will take, before anything is spent."""
    low, high = plan.seconds_range
    rows = [
        ("recipe", f"{recipe.name} ({recipe.digest[:12]})"),
        ("target", recipe.target.name),
        ("family", recipe.drafter.family),
        ("target parameters", f"{plan.target_parameters:,}"),
        ("drafter parameters", f"{plan.parameters:,} ({plan.trainable:,} trained)"),
        *((("THE TARGET CHANGES", _change_text(plan)),) if plan.added else ()),
        ("steps", f"{plan.steps:,}"),
        ("memory", _parts_text(plan.memory_bytes, plan.memory)),
        ("disk", _parts_text(plan.disk_bytes, plan.disk)),
        ("time", f"{duration(low)} to {duration(high)} ({plan.basis})"),
        *((f"  {part.name}", _part_text(part)) for part in plan.parts),
    ]
    console.table(("what", "how much"), rows)


def _change_text(plan: RunPlan) -> str:
    return f"{plan.added:,} added numbers are merged into it; the drafter is for OUT/target alone"


def _part_text(part: Part) -> str:
    low, high = part.seconds_range
    return f"{part.amount}: {duration(low)} to {duration(high)}"


def _parts_text(total: int, parts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {size_text(count)}" for name, count in parts.items() if count)
    return f"{size_text(total)} ({shown})"
