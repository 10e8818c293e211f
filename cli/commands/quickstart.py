"""`specctl quickstart`: from nothing to a proved and measured drafter on this machine.

A chat model answers questions (`quickstart_chat.py`), any other target continues texts
(`quickstart_text.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specctl.api.arguments.recipe import folder_name
from specctl.api.preflight import check_out, check_run
from specctl.cli.app.console import Console
from specctl.cli.commands.quickstart_chat import MEASURED, chat_story
from specctl.cli.commands.quickstart_story import FULL_MINUTES, StoryPlace
from specctl.cli.commands.quickstart_text import scaled, text_story
from specctl.cli.options.flags import Sets
from specctl.cli.options.names import complete_recipe, complete_target
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import RecipeError
from specctl.recipes.load import EMBEDDED, load_recipe
from specctl.recipes.targets import resolve
from specctl.train.runs.kept import kept_in

REAL = "smollm2-135m"  # the chat model that a package of the Python index carries
CHAT, TEXT = "eagle3", "quickstart"  # recipes
FEW_ROWS = ("train.rows=2",)  # of a batch: few answers make more steps of smaller batches
NO_COST = "none"


def quickstart(
    console: Console,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Run folder, where an interrupted run continues; else runs/quickstart-TARGET, of "
            "tiny runs/quickstart.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help=f"Any target; else {REAL}, or {EMBEDDED} (embedded) where that is not here.",
            autocompletion=complete_target,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help=f"A recipe's name or a YAML file; else {CHAT} for a chat model, or {TEXT}.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Rough time budget; data and steps are scaled to it.")
    ] = FULL_MINUTES,
    inflate: Annotated[
        str | None,
        typer.Option(
            help="Compare at this cost, too (100m, 300m, 1b, none); 300m for tiny. Not of chat "
            "models."
        ),
    ] = None,
    set_: Sets = None,
) -> None:
    """Train a drafter for a real chat model, prove it lossless, measure it, say what pays.

    About ten minutes on two CPU cores, no download: where the chat model is not on this machine,
    the embedded target stands in. If interrupted, the same command continues.

    Examples:

      specctl quickstart
      specctl quickstart --target tiny --minutes 3 --out runs/small
    """
    name = target or default_target(console)
    sets, is_embedded = tuple(set_ or ()), name == EMBEDDED
    of_chat = sets if recipe is not None else (*FEW_ROWS, *sets)
    if is_embedded:
        loaded = load_recipe(recipe or TEXT, sets, target=name)
    else:
        loaded = load_recipe(recipe or CHAT, of_chat, target=name)
    words = ("--recipe", recipe or CHAT, *(word for one in of_chat for word in ("--set", one)))
    place = StoryPlace(console, name, out or default_folder(name), minutes, loaded, words)
    if not (place.out / MEASURED).is_file():  # of a story without training, which leaves no run
        check_out(place.out)
    check_run(loaded, place.out)
    console.kept = partial(kept_in, place.out)
    size = inflate or ("300m" if is_embedded else NO_COST)
    if size != NO_COST:
        from specctl.runtime.target.variants.inflate import size_named

        size_named(size)  # before anything is loaded

    console.heading(f"1/5 Load the target: {name}")
    if is_embedded:
        console.say("A small Llama, trained on Python text, stands in for your own model.")
    model = TargetChoice(name, loaded.target.revision, loaded.target.dtype).load(console)
    spec = model.spec
    console.say(
        f"{spec.model_type}, {spec.num_layers} layers, width {spec.hidden_size}, "
        f"vocabulary {spec.vocab_size:,}"
    )
    if not model.is_chat:
        made = scaled(recipe or TEXT, name, minutes, sets)
        text_story(replace(place, recipe=made), model, None if size == NO_COST else size)
    elif size == NO_COST:
        chat_story(place, model)
    else:
        raise RecipeError(
            f"{name} is a chat model, which is measured as it is",
            where="--inflate",
            found=size,
            expected="no --inflate, or a target that is no chat model",
            do="leave --inflate out; specctl bench --inflate measures at another cost",
        )


def default_target(console: Console) -> str:
    """The real chat model where it is on this machine; else the embedded one, and why."""
    from specctl.runtime.target.folders.hub import is_local

    real = resolve(REAL)
    if is_local(real):
        return REAL
    installed = real.installed
    assert installed is not None, f"a package has {REAL}"
    console.say(
        f"{REAL}, a real chat model, is not on this machine: {EMBEDDED} stands in. For the real "
        f"one: {installed.command} (93 MB), then specctl quickstart again"
    )
    return EMBEDDED


def default_folder(target: str) -> Path:
    """A folder for each target: runs/quickstart, or runs/quickstart-TARGET."""
    named = "" if target == EMBEDDED else f"-{folder_name(target)}"
    return Path("runs") / f"quickstart{named}"
