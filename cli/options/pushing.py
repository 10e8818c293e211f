"""`--push REPO`: show what will be uploaded, ask, upload."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.options.flags import panel
from specctl.core.errors import RecipeError

if TYPE_CHECKING:
    from specctl.export.push import PushPlan

hub_option = panel("Hub")

Push = Annotated[
    str | None,
    hub_option("--push", metavar="REPO", help="Upload to this hub repository."),
]
Public = Annotated[
    bool, hub_option("--public", help="Make the repository public; else it is private.")
]
Yes = Annotated[bool, hub_option("--yes", "-y", help="Upload without asking.")]


def pushed(console: Console, folder: Path, repo: str, public: bool, yes: bool) -> dict[str, Any]:
    """Show the plan of the upload, ask unless `yes`, upload; what happened, as JSON."""
    from specctl.export.push import plan_push, push

    plan = plan_push(folder, repo, private=not public)
    _show(console, plan)
    told: dict[str, Any] = {
        "repo": plan.repo,
        "private": plan.private,
        "bytes": plan.bytes,
        "files": sorted(plan.files),
        "proof": plan.has_proof,
        "uploaded": False,
    }
    if not (yes or _may_push(console, plan)):
        return told
    done = push(plan)
    console.out(f"uploaded: {done.url} at {done.revision[:12]}")
    return told | {"uploaded": True, "url": done.url, "revision": done.revision}


def _show(console: Console, plan: PushPlan) -> None:
    rows = [(name, f"{path.stat().st_size:,}") for name, path in plan.files.items()]
    kind = "private" if plan.private else "PUBLIC"
    console.out(f"to {plan.repo} ({kind}), {plan.bytes:,} bytes in one commit:")
    console.table(("file", "bytes"), rows)
    if not plan.has_proof:
        console.warn(f"no proof is uploaded with it: specctl verify {plan.folder} makes one")


def _may_push(console: Console, plan: PushPlan) -> bool:
    if console.json or console.quiet or not (sys.stdin.isatty() and console.stderr.isatty()):
        raise RecipeError(
            "nothing was uploaded: nobody is here to be asked",
            where="--push",
            found=f"{len(plan.files)} files for {plan.repo}, checked and whole",
            expected="an answer at a terminal, or --yes",
            do="the same command with --yes",
        )
    return typer.confirm("upload?", default=False, err=True)
