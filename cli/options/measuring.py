"""Flags of what is measured: on which prompts, how long, how often."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", "-f", help="Text or JSONL file; else the held-out prompts."),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of prompts.")]
Domain = Annotated[str | None, typer.Option(help="Only the held-out prompts of this domain.")]
TokensEach = Annotated[int, typer.Option(min=1, help="Tokens per prompt.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each; the median is shown.")]
Batch = Annotated[int, typer.Option(min=1, max=256, help="Prompts decoded at once.")]
