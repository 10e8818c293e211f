"""`specctl export`: write a drafter in another format, read back and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.api.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.options.flags import Allow
from specctl.cli.options.names import ENGINES, complete_format
from specctl.cli.options.positional import DraftFlag, Word, one_drafter
from specctl.cli.options.pushing import Public, Push, Yes, pushed
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import RecipeError, nearest
from specctl.core.plugins import declared

FORMATS = tuple(declared("specctl.export.formats", "FORMAT"))


def export(
    console: Console,
    package: Word = None,
    draft: DraftFlag = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write; else only --push.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Engine (its format is chosen by the family): "
            + ", ".join(ENGINES)
            + "; or a format, else hf: "
            + ", ".join(FORMATS)
            + ".",
            autocompletion=complete_format,
        ),
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

      specctl export runs/eagle3 --to vllm --out exports/my-eagle3
      specctl export runs/distill --to hf --out runs/distill-hf
      specctl export runs/eagle3 --push OWNER/my-eagle3
    """
    folder = Path(one_drafter(package, draft, "specctl export runs/NAME --to vllm --out FOLDER"))
    _refuse_useless(out, to, push, "--public" if public else "--yes" if yes else "")
    if out is None:
        assert push is not None
        console.done(
            {"push": pushed(console, folder, push, public, yes)}, next=[f"specctl show {folder}"]
        )
        return
    to = to or "hf"
    if to not in (*FORMATS, *ENGINES):
        raise RecipeError(
            f"unknown format {to!r}",
            where="--to",
            found=to,
            expected="one of " + ", ".join(dict.fromkeys([*ENGINES, *FORMATS])),
            do=f"--to {nearest(to, [*FORMATS, *ENGINES], 1)}",
        )
    check_folder(out)
    from specctl.api.export import export as export_
    from specctl.export.formats import format_for
    from specctl.export.package.manifest import package_in, read_manifest

    folder = package_in(folder)
    family = read_manifest(folder).family  # what is no package fails before torch is imported
    form = format_for(to, family)
    if form != to:
        console.say(f"{to} reads a drafter of family {family} in format {form}")
    model = target.or_own(str(folder)).load(console, is_read_only=True)
    result = export_(folder, form, out, target=model, allow=tuple(allow or ()))
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
