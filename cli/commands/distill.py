"""`specctl distill`: train an independent small language model on the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from specctl.api.arguments.recipe import INDEPENDENT, refuse_dependent
from specctl.cli.app.console import Console
from specctl.cli.options.recipe_flags import TrainingFlags
from specctl.cli.options.training import run_training

METHOD = "Method"


@dataclass(frozen=True, slots=True)
class DistillFlags(TrainingFlags):
    """The flags of training, and those that name a way of distillation."""

    FIELDS: ClassVar[Mapping[str, str]] = {
        **TrainingFlags.FIELDS,
        "layers": "drafter.options.layers",
        "width": "drafter.options.width",
        "loss": "drafter.options.loss",
        "on_policy": "data.on_policy",
        "select": "train.select",
        "reference": "train.reference",
    }

    FAMILIES: ClassVar[tuple[str, ...]] = INDEPENDENT

    init: Annotated[
        str | None,
        typer.Option(
            "--from",
            "--init",
            metavar="SMALL_LM",
            help="Start from these weights: a package, a run, a Hugging Face folder, or target.",
            rich_help_panel=METHOD,
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers", min=1, max=1_000, help="Layers of the draft.", rich_help_panel=METHOD
        ),
    ] = None
    width: Annotated[
        int | None,
        typer.Option(
            "--width", min=1, max=1_000_000, help="Width of the draft.", rich_help_panel=METHOD
        ),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            help="ce, kl, rkl, jsd, tv, lk_alpha or lk_hybrid; else the recipe's.",
            rich_help_panel=METHOD,
        ),
    ] = None
    on_policy: Annotated[
        float | None,
        typer.Option(
            "--on-policy",
            min=0.0,
            max=1.0,
            metavar="P",
            help="Share of each batch that the draft itself writes.",
            rich_help_panel=METHOD,
        ),
    ] = None
    select: Annotated[
        str | None,
        typer.Option(
            "--select",
            help="Learn only some tokens: highest (AdaSPEC), lowest, random or none.",
            rich_help_panel=METHOD,
        ),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            help="Model that --select compares with; else one is trained first.",
            rich_help_panel=METHOD,
        ),
    ] = None


def distill(console: Console, run: DistillFlags) -> None:
    """Train an independent small language model on the target's distribution.

    The model runs without the target's features, so it can be exported and used as
    assistant_model in transformers. The recipe's family must be an independent model.

    Examples:

      specctl distill --target tiny --out runs/distill
      specctl distill --target tiny --loss jsd --on-policy 0.5 --out runs/jsd
      specctl distill --target qwen3-8b --from ./qwen3-0.6b --data chats.jsonl --dry-run
    """
    recipe = run.load()
    refuse_dependent(recipe.name, recipe.drafter.family)
    run_training(console, run)
