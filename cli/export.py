"""`specctl export`: write a drafter in another format, and load it back to compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.console import Console
from specctl.cli.flags import Out
from specctl.recipes.errors import RecipeError, nearest

FORMATS = ("hf", "specctl")


def export(
    console: Console,
    draft: Annotated[str, typer.Option("--draft", "-d", help="Package folder to export.")],
    out: Out,
    to: Annotated[str, typer.Option("--to", help="hf (transformers) or specctl.")] = "hf",
) -> None:
    """Write a package in another format. What was written is loaded back and compared.

    An hf export of a small-lm drafter loads in transformers and works as assistant_model.

    Examples:

      specctl export --draft runs/distill/package --to hf --out runs/distill-hf
      specctl export --draft runs/distill/package --to specctl --out copies/distill
    """
    if to not in FORMATS:
        raise RecipeError(
            f"unknown format {to!r}",
            where="--to",
            found=to,
            expected="one of " + ", ".join(FORMATS),
            do=f"--to {nearest(to, FORMATS, 1)}",
        )
    from specctl.export.formats import export as export_

    written = export_(Path(draft), to, out, command=["specctl", *sys.argv[1:]])
    files = sorted(p.name for p in out.iterdir())
    console.out(f"{out}: {', '.join(files)}")
    del written
    console.done({"out": str(out), "format": to, "files": files}, next=[f"specctl show {out}"])
