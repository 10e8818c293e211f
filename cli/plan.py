"""`specctl plan`: what a recipe will take, before anything is spent."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.console import Console
from specctl.cli.scaling import plan_scaling
from specctl.cli.training import RecipeFlags, show_plans


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
