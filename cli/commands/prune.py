"""`specctl prune`: a drafter cut out of the target itself, healed by distillation."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.api.preflight import check_out, check_run
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.app.launch import use_device
from specctl.cli.commands.plan import shown, without_dry_run
from specctl.cli.commands.shapes import SearchFlags, search_shapes
from specctl.cli.options.flags import Offline
from specctl.cli.options.recipe_flags import DryRun, TunedFlags
from specctl.cli.options.target_choice import TargetChoice
from specctl.cli.options.training import finish
from specctl.core.errors import RecipeError
from specctl.core.hub_access import go_offline

if TYPE_CHECKING:
    from specctl.api.prune import PruneJob, PruneResult
    from specctl.recipes.schema import Recipe

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


def prune(
    console: Console,
    run: TunedFlags = PRUNE,
    cut: CutFlags = CutFlags(),
    search: SearchFlags = NO_SEARCH,
    dry_run: DryRun = False,
    offline: Offline = False,
) -> None:
    """Cut a drafter out of the target itself, and heal it by distillation.

    The layers, heads, MLP neurons and channels that matter least on text of the target are removed,
    and training starts from the rest. OUT/cut is the drafter before healing, OUT/package the
    result, OUT/prune.json what was cut and why. The same command continues an interrupted run.

    --search cuts nothing: it ranks shapes by predicted tokens/s on this device.

    Examples:

      specctl prune --target tiny --layers 2 --out runs/prune
      specctl prune --target qwen3-8b --layers 4 --importance alpha --heal-steps 2000 --dry-run
      specctl prune --target tiny --layers 4 --width 0.75,mlp=0.5 --heads 2 --heal-steps 0
      specctl prune --target tiny --search --depths 1,2,4 --widths 128,256 --heal-steps 60
    """
    from specctl.api.prune import Cut, PruneJob, cut_table
    from specctl.api.prune import prune as prune_
    from specctl.train.runs.kept import kept_in

    recipe, wanted = run.load(), Cut(**asdict(cut))
    wanted.check(recipe)
    search.refuse_ignored()
    use_device(run.device, 1)
    if offline:
        go_offline()
    out = run.folder(recipe)
    if not search.search:  # which keeps a folder of its own kind
        check_out(out)
    check_run(recipe, out)
    if not dry_run:
        console.kept = partial(kept_in, out)
    if search.search:
        if dry_run:
            raise _search_unplanned()
        search_shapes(console, recipe, out, search, cut.heal_steps, run)
        return
    if dry_run:
        _show_plans(console, PruneJob(recipe, wanted, out))
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
        _finish_unhealed(console, recipe, result)
    else:
        finish(console, result.run, more={"prune": result.report})


def _show_plans(console: Console, job: PruneJob) -> None:
    """What the cut and its healing will take; nothing is loaded."""
    from specctl.train.planning.target_shape import target_shape
    from specctl.train.prune.run import prune_plans

    recipe = job.data_recipe()
    wanted = job.cut.wanted(recipe, target_shape(recipe.target).spec)
    plans = prune_plans(recipe, wanted, job.steps, job.cut.two_step)
    console.done(shown(console, recipe, plans, job.out), next=[without_dry_run()])


def _finish_unhealed(console: Console, recipe: Recipe, result: PruneResult) -> None:
    package, target = result.package, TargetChoice.of_recipe(recipe.target).words()
    if recipe.vocab.size is not None:
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
