"""`specctl prune`: a drafter cut out of the target itself, healed by distillation."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.api.derive import RECORD as DERIVED_FILE
from specctl.api.preflight import check_out, check_run
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.app.launch import use_device
from specctl.cli.commands.plan import shown, without_dry_run
from specctl.cli.commands.shapes import SearchFlags, search_shapes
from specctl.cli.options.deriving import Deriving
from specctl.cli.options.flags import Offline
from specctl.cli.options.recipe_flags import DryRun, TunedFlags
from specctl.cli.options.target_choice import TargetChoice
from specctl.cli.options.training import finish
from specctl.core.errors import FileError, RecipeError
from specctl.core.storage.hub_access import go_offline
from specctl.recipes.load import with_fields

if TYPE_CHECKING:
    from specctl.api.prune import PruneJob, PruneResult
    from specctl.recipes.schema import Recipe, TargetPart
    from specctl.train.planning.pace import Pace
    from specctl.train.planning.work import Part

PRUNE, NO_SEARCH = TunedFlags(recipe="prune"), SearchFlags()


@dataclass(frozen=True, slots=True)
class CutFlags:
    """What is to be left of the target, and how that is chosen."""

    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Layers to keep; else the recipe's.")
    ] = None
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="SPEC",
            help="Channels and MLP neurons to keep: 192, 0.5 (of the target's), 192,mlp=0.5.",
        ),
    ] = None
    heads: Annotated[
        str | None,
        typer.Option("--heads", metavar="SPEC", help="Query heads to keep, or QUERY/KV as in 8/2."),
    ] = None
    importance: Annotated[
        str,
        typer.Option(
            "--importance",
            help="Importance of a layer: bi (block influence), alpha (acceptance lost without it), "
            "activation (size of what it adds).",
        ),
    ] = "bi"
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Cut one span of neighbouring layers.")
    ] = False
    heal_steps: Annotated[
        int | None,
        typer.Option(
            "--heal-steps", min=0, help="Steps of distillation after the cut; else the recipe's."
        ),
    ] = None
    two_step: Annotated[
        bool,
        typer.Option("--two-step", help="Cut and heal twice; for large cuts."),
    ] = False


HealingTime = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="TIME",
        help="Derive answers and steps of the healing from the target, the data and this machine, "
        "to be done with the cut in that time: 40m, 2h.",
    ),
]


def prune(
    console: Console,
    run: TunedFlags = PRUNE,
    cut: CutFlags = CutFlags(),
    search: SearchFlags = NO_SEARCH,
    time: HealingTime = None,
    dry_run: DryRun = False,
    offline: Offline = False,
) -> None:
    """Cut a drafter out of the target itself, and heal it by distillation.

    The layers, heads, MLP neurons and channels that matter least on text of the target are removed,
    and training starts from the rest. OUT/cut is the drafter before healing, OUT/package the
    result, OUT/prune.json what was cut and why. The same command continues an interrupted run.

    --time decides how many answers the target writes and how long the rest is healed.

    --search cuts nothing: it ranks shapes by predicted tokens/s on this device.

    Examples:

      specctl prune --target tiny --layers 2 --out runs/prune
      specctl prune --target qwen3-8b --layers 4 --importance alpha --heal-steps 2000 --dry-run
      specctl prune --target ./my-model --layers 8 --data chats.jsonl --time 2h
      specctl prune --target tiny --layers 4 --width 0.75,mlp=0.5 --heads 2 --heal-steps 0
      specctl prune --target tiny --search --depths 1,2,4 --widths 128,256 --heal-steps 60
    """
    from specctl.api.prune import Cut, PruneJob, cut_table
    from specctl.api.prune import prune as prune_
    from specctl.train.runs.kept import kept_in

    recipe, wanted = run.load(), Cut(**asdict(cut))
    wanted.check(recipe.name, recipe.drafter.family)
    search.refuse_ignored()
    use_device(run.device, 1)
    if offline:
        go_offline()
    out = run.folder(recipe.target.name, recipe.name)
    if not search.search:  # which keeps a folder of its own kind
        check_out(out)
    check_run(recipe, out)
    if not dry_run:
        console.kept = partial(kept_in, out)
    if time is not None:
        _check_timed(out, cut, search)
    if search.search:
        if dry_run:
            raise _search_unplanned()
        search_shapes(console, recipe, out, search, cut.heal_steps, run)
        return
    recipe, pace = _derived(console, run, PruneJob(recipe, wanted, out), time, dry_run)
    if dry_run:
        _show_plans(console, PruneJob(recipe, wanted, out), pace)
        return
    result = prune_(
        None,
        recipe,
        out=out,
        cut=wanted,
        progress=console,
        command=["specctl", *sys.argv[1:]],
        on_cut=lambda report: console.show(cut_table(report.to_json())),
    )
    if result.run is None:
        _finish_unhealed(console, recipe.target, recipe.vocab.size is not None, result)
    else:
        finish(console, result.run, more={"prune": result.report})


def _derived(
    console: Console, run: TunedFlags, job: PruneJob, time: str | None, dry_run: bool
) -> tuple[Recipe, Pace | None]:
    """The recipe whose answers and steps fill the time that was given now, or when the run in its
    folder began; and the pace, where it was measured now."""
    from specctl.train.planning.target_shape import target_shape
    from specctl.train.prune.run import cut_parts, prune_plans, shape_fields

    recipe, out = job.recipe, job.out
    if time is None and not (out / DERIVED_FILE).exists():
        return recipe, None
    spec = target_shape(recipe.target).spec
    wanted = job.cut.wanted(recipe.drafter.options, spec)
    if job.cut.heal_steps is not None:
        recipe = with_fields(recipe, {"train.steps": job.cut.heal_steps}, "--heal-steps")

    def before() -> tuple[Part, ...]:
        ((_, made),) = prune_plans(recipe, wanted, recipe.train.steps, False)
        return cut_parts(made)

    shaped = with_fields(recipe, shape_fields(recipe.drafter, wanted, spec), "prune")
    deriving, pace = Deriving(shaped, out, run.recipe, time, before=before), None
    if dry_run:
        derived, pace = deriving.of_plan(console)
    else:
        derived = deriving.of_run(console)
    own = {field: said for field, said in recipe.origin.items() if field.startswith("drafter.")}
    kept = derived.model_copy(update={"drafter": recipe.drafter})
    return kept.with_origin({**derived.origin, **own}), pace


def _check_timed(out: Path, cut: CutFlags, search: SearchFlags) -> None:
    """Refuse a time where there is no single healing to fill it, and for a cut that was made
    without one."""
    for flag, is_given in (
        ("--search", search.search),
        ("--two-step", cut.two_step),
        ("--heal-steps 0", cut.heal_steps == 0),
    ):
        if is_given:
            raise RecipeError(
                f"--time decides how long one cut is healed, and {flag} does otherwise",
                where="--time",
                found=flag,
                expected="one cut, and its healing",
                do=f"leave out {flag}, or --time",
            )
    from specctl.api.prune import REPORT

    if (out / REPORT).exists() and not (out / DERIVED_FILE).exists():
        raise FileError(
            f"{out} holds a cut whose recipe was not derived",
            where="--time",
            found=str(out / REPORT),
            expected="a new folder",
            do="choose another --out, or leave --time out to go on with it",
        )


def _show_plans(console: Console, job: PruneJob, pace: Pace | None) -> None:
    """What the cut and its healing will take; nothing is loaded."""
    from specctl.train.planning.target_shape import target_shape
    from specctl.train.prune.run import prune_plans

    recipe = job.data_recipe()
    wanted = job.cut.wanted(recipe.drafter.options, target_shape(recipe.target).spec)
    plans = prune_plans(recipe, wanted, job.steps, job.cut.two_step, pace=pace)
    about = {"recipe": recipe.to_json(), "origin": recipe.origin}
    result = shown(console, about, plans, [job.out] * len(plans))
    console.done(result, next=[without_dry_run()])


def _finish_unhealed(
    console: Console, part: TargetPart, is_trimmed: bool, result: PruneResult
) -> None:
    package, target = result.package, TargetChoice.of_recipe(part).words()
    if is_trimmed:
        console.say("the vocabulary is whole: it is trimmed while healing, or by vocab-trim")
    console.out(
        f"cut {package} | alpha {result.report['alpha']:.3f} | tau {result.tau:.2f}, not healed"
    )
    following = [
        command_line("vocab-trim", package, *target, "--out", f"{result.out}-trimmed"),
        with_text("generate", *target, "--draft", package, "--compare"),
    ]
    console.done(result.to_json(), next=following)


def _search_unplanned() -> RecipeError:
    return RecipeError(
        "a search is not planned beforehand: it heals every shape",
        where="--dry-run",
        found="--search --dry-run",
        expected="one of the two",
        do="leave out --dry-run; or plan one shape: specctl prune --layers 2 --dry-run",
    )
