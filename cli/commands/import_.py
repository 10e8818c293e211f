"""`specctl import`: a published drafter becomes a package, proved against its engine's rules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specctl.api.arguments.outputs import check_folder
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.options.flags import Out
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import FileError

TINY = TargetChoice()


def import_(
    console: Console,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder of the published drafter.")
    ],
    out: Out,
    num_prompts: Annotated[
        int, typer.Option(min=0, help="Held-out prompts that tau is measured on; 0 for none.")
    ] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 48,
    family: Annotated[
        str | None, typer.Option(help="What a LoRA adapter of peft is: uno. Others say it.")
    ] = None,
    target: TargetChoice = TINY,
) -> None:
    """Make a package from a published drafter.

    The package can be verified, measured, served, adapted, trimmed and exported. What can be read:
    EAGLE-3 (speculators, SafeAILab, SpecForge, ModelOpt), EAGLE-1 and -2, HASS, P-EAGLE, DFlash,
    DFlash2, DSpark, Domino, XPress and LiLiCorr (z-lab, DeepSpec, SpecForge, ModelOpt,
    speculators), Medusa, MLP speculators (IBM), the MTP module of a whole checkpoint
    (DeepSeek-V3, GLM-4.5, Qwen3-Next), and UNO's adapters (peft, with --family uno).

    The package is written only if it drafts what the head's own engine would draft; then tau is
    measured on a few prompts of your target and shown beside what the head's README says. Pickles
    are refused and no code of the folder is run. docs/export.md lists what can be read.

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
    from specctl.api.import_head import import_head

    found = import_head(
        path,
        out,
        target=target.load(console),
        prompts=num_prompts,
        new_tokens=max_new_tokens,
        family=family,
        progress=console,
        command=["specctl", *sys.argv[1:]],
    )
    report, manifest = found.report, found.report.manifest
    vocabulary = manifest.vocabulary
    console.out(
        f"{out}: {manifest.family}, {manifest.parameters:,} parameters, "
        f"{vocabulary.draft_size:,} of {vocabulary.target_size:,} tokens; "
        f"drafts what {report.engine} makes of the folder"
    )
    if report.measured is not None:
        many = f"{num_prompts} prompts x {max_new_tokens} tokens, greedy"
        console.out(f"tau {report.measured.tau:.3f} on {many} (specctl bench measures more)")
        for name, tau in report.measured.readings.items():
            console.out(f"tau {tau:.3f} {name}")
    for line in report.claims:
        console.out(f"its README says: {line}")
    for note in report.notes:
        console.warn(note)
    console.done(
        found.to_json(),
        next=[
            command_line("bench", *target.words(), out),
            command_line("verify", out, *target.words(), "--level", "lossless"),
        ],
    )
