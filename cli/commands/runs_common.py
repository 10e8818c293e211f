"""What a run does next, and where it is named: shared by the commands of `specctl runs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specctl.train.runs.folders import RunStatus

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def after(run: RunStatus) -> list[str]:
    """What to do next with a run."""
    if run.state == "running":
        return [f"specctl runs tail {run.path} --follow"]
    if run.state == "finished":
        return [f"specctl show {run.path}/package"]
    if run.state == "damaged":
        return [f"specctl runs show {run.path} --hashes"]
    return [f"specctl runs resume {run.path}"]
