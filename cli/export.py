"""`specctl export`: write a drafter in another format, loaded back and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli.console import Console
from specctl.cli.flags import Allow, Device, Offline, Out
from specctl.cli.loading import TargetChoice
from specctl.recipes.errors import RecipeError, nearest

FORMATS = ("hf", "specctl")


def export(
    console: Console,
    draft: Annotated[Path, typer.Option("--draft", "-d", help="Package folder to export.")],
    out: Out,
    to: Annotated[str, typer.Option("--to", help="hf (transformers) or specctl.")] = "hf",
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="The target; else the package's own.")
    ] = None,
    allow: Allow = None,
    device: Device = "auto",
    offline: Offline = False,
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
    from specctl.export.manifest import read_manifest

    record = read_manifest(draft).target
    choice = TargetChoice(
        target or record.name,
        revision=None if target else record.revision,
        device=device,
        inflate=None if target else record.inflated,
        offline=offline,
    )
    from specctl.export.formats import export as export_

    manifest = export_(draft, to, out, choice.load(console), allow=tuple(allow or ()))
    files = sorted(p.name for p in out.iterdir())
    console.out(f"{out}: {', '.join(files)}")
    result = {"out": str(out), "format": to, "files": files, "sha256": manifest.digest}
    console.done(result, next=[f"specctl show {out}"])
