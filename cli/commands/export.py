"""`specctl export`: write a drafter in another format, read back and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.outputs import check_folder
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
    if push is None and (public or yes):
        raise RecipeError(
            "there is nothing to upload",
            where="--public" if public else "--yes",
            found="no --push",
            expected="--push REPO beside it",
            do="--push OWNER/NAME",
        )
    if out is None:
        if push is None or to is not None:
            raise RecipeError(
                "there is no folder to write to",
                where="--out",
                found="no --out",
                expected="a folder, or --push alone, which uploads the package as it is",
                do="--out FOLDER",
            )
        told = pushed(console, draft, push, public, yes)
        console.done({"push": told}, next=[f"specctl show {draft}"])
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
    from specctl.export.formats import export as export_
    from specctl.export.formats import filled
    from specctl.export.package.manifest import package_in, read_manifest
    from specctl.recipes.targets import resolve

    draft = package_in(draft)
    read_manifest(draft)  # what is no package fails before torch is imported
    model = target.or_own(str(draft)).load(console)

    manifest = export_(draft, to, out, model, allow=tuple(allow or ()))
    files = sorted(p.name for p in out.iterdir())
    console.out(f"{out}: {', '.join(files)}")
    for note in manifest.notes:
        console.warn(note)
    place = resolve(model.name).path
    commands = [filled(line, out, place) for line in manifest.served_by]
    result: dict[str, Any] = {"out": str(out), "format": to, "files": files}
    result["sha256"] = manifest.digest
    if push is not None:
        result["push"] = pushed(console, out, push, public, yes)
    console.done({**result, "serve": commands}, next=[f"specctl show {out}", *commands])
