"""`specctl targets`: the models of this machine, the built-in names, and the drafts that fit. No
torch."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.core.messages.sizes import size_text


def targets(
    console: Console,
    here: Annotated[
        bool, typer.Option("--here", help="Only what is on this machine, without the aliases.")
    ] = False,
) -> None:
    """List the models that this machine has, and the drafts that fit each.

    Models of the hub's cache, GGUF files of LM Studio, Ollama and llama.cpp, and the built-in
    names. Drafts are packages made for the model (published with specctl, below ./runs and in the
    hub's cache), and models of at most half its size with the same vocabulary.
    Families without training fit every target.

    Examples:

      specctl targets
      specctl targets --here --json
    """
    from specctl.api.models_here import aliases_here, can_be_target, models_here

    models = models_here()
    named = [] if here else aliases_here(models)
    columns = ("model", "kept by", "size", "kind", "drafts that fit")
    rows = [
        (
            one.name,
            one.place,
            size_text(one.bytes),
            "GGUF" if one.is_gguf else one.model_type,
            ", ".join(one.drafts) or None,
        )
        for one in models
    ]
    if rows:
        console.table(columns, rows, "On this machine")
    else:
        console.out("no model in the hub's cache, nor of LM Studio, Ollama or llama.cpp")
    if named:
        console.out()
        console.table(
            (
                "alias",
                "stands for",
                "here",
                "parameters",
                "packages, small models",
            ),
            [
                (
                    one.name,
                    one.stands_for,
                    one.is_here,
                    _short(one.shape.parameters),
                    ", ".join(one.drafts) or None,
                )
                for one in named
            ],
            "Built-in names",
        )
    fitting = next((one for one in models if one.drafts and can_be_target(one)), None)
    first = next((one for one in models if can_be_target(one)), None)
    words = ["--target", first.name] if first else []
    following = (
        command_line("bench", "prompt-lookup", *words)
        if fitting is None
        else command_line("bench", "--target", fitting.name, fitting.drafts[0])
    )
    result = {
        "models": [one.to_json() for one in models],
        "aliases": [one.to_json() for one in named],
    }
    console.done(result, next=[following])


def _short(parameters: int) -> str:
    in_billions = parameters >= 999.5e6  # which would be rounded to 1000M
    return f"{parameters / 1e9:.1f}B" if in_billions else f"{parameters / 1e6:.0f}M"
