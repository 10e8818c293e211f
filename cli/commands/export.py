"""`specctl export`: write a drafter in another format, read back and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.api.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.options.flags import Allow
from specctl.cli.options.pushing import Public, Push, Yes, pushed
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import RecipeError, nearest
from specctl.core.plugins import declared

FORMATS = tuple(declared("specctl.export.formats", "FORMAT"))


def export(
    console: Console,
    draft: Annotated[
        Path, typer.Option("--draft", "-d", help="Package folder to export, or its run.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write; else only --push.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Format, else hf: " + ", ".join(FORMATS) + ".")
    ] = None,
    allow: Allow = None,
    push: Push = None,
    public: Public = False,
    yes: Yes = False,
    target: TargetChoice = OWN_TARGET,
) -> None:
    """Write a package in a serving engine's format. What was written is read back by that engine's
    rules and must draft what the drafter drafts; the commands that serve it are printed.

    docs/export.md tells which format holds which family and which engine reads it. With --push what
    was written is uploaded to the hub, or, without --out, the package itself with the record of its
    proof: to a private repository, after every byte was checked and the plan shown.

    Examples:

      specctl export --draft runs/distill/package --to hf --out runs/distill-hf
      specctl export --draft runs/eagle3/package --to speculators --out exports/my-eagle3
      specctl export --draft runs/eagle3/package --push OWNER/my-eagle3
    """
    _refuse_useless(out, to, push, "--public" if public else "--yes" if yes else "")
    if out is None:
        assert push is not None
        console.done(
            {"push": pushed(console, draft, push, public, yes)}, next=[f"specctl show {draft}"]
        )
        return
    to = to or "hf"
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
    told: dict[str, Any] = result.to_json()
    if push is not None:
        told["push"] = pushed(console, out, push, public, yes)
    console.done(told, next=[f"specctl show {out}", *result.serve])


def _refuse_useless(out: Path | None, to: str | None, push: str | None, also: str) -> None:
    """Flags of an upload without one, and an export that has no place."""
    if push is None and also:
        raise RecipeError(
            "there is nothing to upload",
            where=also,
            found="no --push",
            expected="--push REPO beside it",
            do="--push OWNER/NAME",
        )
    if out is None and (push is None or to is not None):
        raise RecipeError(
            "there is no folder to write to",
            where="--out",
            found="no --out",
            expected="a folder, or --push alone, which uploads the package as it is",
            do="--out FOLDER",
        )
