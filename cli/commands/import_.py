"""`specctl import`: a published drafter becomes a package, proved against its engine's rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specctl.api.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.options.flags import Out
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import FileError

TINY = TargetChoice()


def import_(
    console: Console,
    folder: Annotated[str, typer.Argument(help="Folder of the published drafter.")],
    out: Out,
    target: TargetChoice = TINY,
) -> None:
    """Make a package of a published EAGLE-3 head (speculators, SafeAILab, SpecForge, ModelOpt) or
    of Medusa heads, so that it can be verified, measured, served, adapted, trimmed and exported.

    The package is written only if it drafts what the head's own engine would draft. Pickles are
    refused and no code of the folder is run. docs/export.md lists what can be read.

    Examples:

      specctl import ./eagle3-head --target qwen3-8b --out runs/eagle3-head
    """
    check_folder(out)
    path = Path(folder).expanduser()
    if not path.exists():
        hub = folder.count("/") == 1 and not folder.startswith((".", "~", "/"))
        raise FileError(
            "no such folder",
            found=folder,
            expected="a folder of this machine",
            do=f"hf download {folder} --local-dir {folder.partition('/')[2]}"
            if hub
            else "check the path; for the hub: hf download OWNER/NAME --local-dir FOLDER",
        )
    from specctl.export.imports import import_published

    model = target.load(console)
    report = import_published(path, model, out, command=["specctl", *sys.argv[1:]])
    manifest = report.manifest
    vocabulary = manifest.vocabulary
    console.out(
        f"{out}: {manifest.family}, {manifest.parameters:,} parameters, "
        f"{vocabulary.draft_size:,} of {vocabulary.target_size:,} tokens; "
        f"drafts what {report.engine} makes of the folder"
    )
    for note in report.notes:
        console.warn(note)
    result = {"out": str(out), "format": report.format, "engine": report.engine}
    result |= {"family": manifest.family, "sha256": manifest.digest}
    console.done(
        result,
        next=[
            f"specctl bench --target {target.name} --draft {out}",
            f"specctl verify {out} --target {target.name} --level lossless",
        ],
    )
