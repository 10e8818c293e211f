"""`specctl train-draft`: train a drafter for a target from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.console import Console
from specctl.cli.flags import Sets

RUN, HARDWARE = "Run", "Hardware"

Recipe = Annotated[
    str, typer.Option("--recipe", "-r", help="A recipe's name (specctl recipes ls) or a YAML file.")
]
Target = Annotated[
    str | None, typer.Option("--target", "-t", help="Alias, hub id or folder; else the recipe's.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", help="Text, JSONL, parquet or hub data set; else the recipe's."),
]
OutFolder = Annotated[
    Path | None, typer.Option("--out", "-o", help="Run folder; else runs/TARGET-RECIPE.")
]
Gpus = Annotated[int, typer.Option(min=1, help="GPUs, one process each.", rich_help_panel=HARDWARE)]
Processes = Annotated[
    int, typer.Option(min=1, help="Processes on the CPU.", rich_help_panel=HARDWARE)
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume", help="Continue the run in OUT if there is one.", rich_help_panel=RUN
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show the plan and stop.", rich_help_panel=RUN),
]
AllowChange = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="FIELD",
        help="Continue although this changed: config, target, data, vocab, world-size.",
        rich_help_panel=RUN,
    ),
]


def train_draft(
    console: Console,
    recipe: Recipe = "distill",
    target: Target = None,
    data: Data = None,
    out: OutFolder = None,
    set_: Sets = None,
    gpus: Gpus = 1,
    processes: Processes = 1,
    resume: Resume = True,
    dry_run: DryRun = False,
    allow: AllowChange = None,
) -> None:
    """Train a drafter: the target writes answers, the drafter learns them, the best is packaged.

    Ctrl-C or SIGTERM saves the state (exit code 75); the same command continues exactly.
    The package in OUT/package is the checkpoint with the best measured tau.

    Examples:

      specctl train-draft --target tiny --recipe eagle3
      specctl train-draft --target qwen3-8b --recipe qwen3-8b-eagle3 --data chats.jsonl --gpus 4
      specctl train-draft --recipe medusa --set train.steps=200 --dry-run
    """
    from specctl.cli.training import TrainingFlags, run_training

    flags = TrainingFlags(
        recipe, target, data, out, tuple(set_ or ()), gpus, processes, resume, dry_run,
        tuple(allow or ()),
    )  # fmt: skip
    run_training(console, flags)
