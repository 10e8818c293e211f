"""`specctl plan`: what a recipe will take, before anything is spent."""

from __future__ import annotations

from specctl.cli.console import Console
from specctl.cli.flags import Sets
from specctl.cli.train_draft import Data, OutFolder, Recipe, Target


def plan(
    console: Console,
    recipe: Recipe = "distill",
    target: Target = None,
    data: Data = None,
    out: OutFolder = None,
    set_: Sets = None,
) -> None:
    """Show parameters, memory, disk and time of a training run. Nothing is loaded or written.

    Time is an estimate with a range; after twenty steps of a run in OUT it is measured.

    Examples:

      specctl plan --recipe eagle3 --target tiny
      specctl plan --recipe medusa --set train.steps=2000 --json
    """
    from specctl.cli.training import TrainingFlags, show_plan

    flags = TrainingFlags(recipe, target, data, out, tuple(set_ or ()), 1, 1, True, True, ())
    loaded = flags.load()
    from specctl.train.plan import plan as plan_

    made = plan_(loaded, out=flags.folder(loaded))
    show_plan(console, loaded, made)
    result = {"recipe": loaded.to_json(), "origin": loaded.origin, "plan": made.to_json()}
    chosen = "" if target is None else f" --target {target}"
    console.done(result, next=[f"specctl train-draft --recipe {recipe}{chosen}"])
