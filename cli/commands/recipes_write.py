"""`specctl recipes write`: a recipe derived for a target, as a file to read and to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.commands.recipe_commands import new_file, write_recipe
from specctl.cli.options.recipe_flags import PlanFlags

DERIVING = PlanFlags(recipe="eagle3", time="40m")


def write(
    console: Console,
    dest: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    run: PlanFlags = DERIVING,
) -> None:
    """Derive a recipe for a target, the data and this machine, and write it with its reasons.

    The same as `train-draft --time` does before it begins. The method is that of --recipe; what
    you set yourself is kept.

    Examples:

      specctl recipes write mine.yaml --target ./my-model --data chats.jsonl
      specctl recipes write mine.yaml --target ./my-model --recipe distill --data self --time 2h
    """
    from specctl.api.derive import derive_recipe
    from specctl.api.preflight import check_run
    from specctl.cli.app.launch import use_device
    from specctl.cli.options.deriving import USUAL, show
    from specctl.recipes.written import recipe_text

    recipe, time = run.load(), run.time or USUAL
    path = new_file(dest, force, f"specctl recipes write {dest}")
    use_device(run.device, 1)
    check_run(recipe, run.folder(recipe.target.name, recipe.name))
    console.say(f"deriving {recipe.name} for {recipe.target.name}, to be done in {time}")
    derived = derive_recipe(recipe=recipe, time=time, progress=console)
    show(console, derived)
    made = derived.recipe
    words = " ".join(run.words())
    head = (
        f"{command_line('train-draft', '--recipe', path)}\n"
        f"Derived from recipe {recipe.name}, to be done in {time} on the machine that wrote it:\n"
        f"specctl recipes write {path.name} {words}"
    )
    reasons = {choice.field: choice.reason for choice in derived.choices}
    text = recipe_text(made.to_json(), reasons, head)
    write_recipe(path, text, force, f"specctl recipes write {dest}")
    console.out(str(path))
    following = command_line("train-draft", "--recipe", path)
    console.done({"path": str(path), **derived.to_json()}, next=[following])
