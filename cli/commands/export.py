"""`specctl export`: write a drafter in another format, read back and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.api.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.options.flags import Allow, Out
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import RecipeError, nearest
from specctl.core.plugins import declared

FORMATS = tuple(declared("specctl.export.formats", "FORMAT"))


def export(
    console: Console,
    draft: Annotated[
        Path, typer.Option("--draft", "-d", help="Package folder to export, or its run.")
    ],
    out: Out,
    to: Annotated[str, typer.Option("--to", help="Format: " + ", ".join(FORMATS) + ".")] = "hf",
    allow: Allow = None,
    target: TargetChoice = OWN_TARGET,
) -> None:
    """Write a package in a serving engine's format. What was written is read back by that engine's
    rules and must draft what the drafter drafts; the commands that serve it are printed.

    docs/export.md tells which format holds which family and which engine reads it.

    Examples:

      specctl export --draft runs/distill/package --to hf --out runs/distill-hf
      specctl export --draft runs/eagle3/package --to speculators --out exports/my-eagle3
    """
    if to not in FORMATS:
        raise RecipeError(
            f"unknown format {to!r}",
            where="--to",
            found=to,
            expected="one of " + ", ".join(FORMATS),
            do=f"--to {nearest(to, FORMATS, 1)}",
        )
    check_folder(out)
    from specctl.api.export import export as export_
    from specctl.export.package.manifest import package_in, read_manifest

    draft = package_in(draft)
    read_manifest(draft)  # what is no package fails before torch is imported
    model = target.or_own(str(draft)).load(console, is_read_only=True)
    result = export_(draft, to, out, target=model, allow=tuple(allow or ()))
    console.out(f"{out}: {', '.join(result.files)}")
    for note in result.notes:
        console.warn(note)
    console.done(result.to_json(), next=[f"specctl show {out}", *result.serve])
