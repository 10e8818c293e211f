"""`specctl plan`: what a recipe will take, before anything is spent."""

from __future__ import annotations

from specctl.cli.console import Console
from specctl.cli.training import RecipeFlags, show_plans


def plan(console: Console, run: RecipeFlags) -> None:
    """Show parameters, memory, disk and time of a training run. Nothing is loaded or written.

    Time is an estimate with a range; after twenty steps of a run in OUT it is measured.

    Examples:

      specctl plan --recipe eagle3 --target tiny
      specctl plan --recipe medusa --set train.steps=2000 --json
    """
    loaded = run.load()
    result = show_plans(console, loaded, run.folder(loaded))
    chosen = "" if run.target is None else f" --target {run.target}"
    console.done(result, next=[f"specctl train-draft --recipe {run.recipe}{chosen}"])
