"""`specctl runs clean`: delete what runs can do without."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.memory import size_text
from specctl.core.errors import FileError

if TYPE_CHECKING:
    from specctl.train.runs.folders import RunStatus

Keep = Annotated[
    int, typer.Option("--keep", min=1, help="Newest checkpoints kept beside the best.")
]


def clean(
    console: Console,
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Runs, or where they lie.")
    ] = None,
    keep: Keep = 2,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete what runs can do without: leftovers, damaged and superseded checkpoints.

    Never the best checkpoint, never the newest ones, nothing of a run that is running.

    Example:

      specctl runs clean runs
    """
    from specctl.train.runs.folders import dispensable, find_runs, read_run, size_of

    looked = [path for folder in folders or [Path("runs")] for path in _runs_in(folder, find_runs)]
    found = [read_run(path) for path in looked]
    for run in found:
        if run.holder is not None:
            console.say(f"{run.path} is running: left alone")
    going = [(run, path) for run in found for path in dispensable(run, keep)]
    sizes = [size_of(path) for _, path in going]
    rows = [(path, size_text(size)) for (_, path), size in zip(going, sizes, strict=True)]
    if rows:
        console.table(("would go", "size"), rows)
    else:
        console.say(f"nothing to delete in {len(found)} runs")
    is_agreed = bool(going) and (yes or _asked(console, len(going), sum(sizes)))
    deleted = [path for run in found for path in _delete(console, run, keep)] if is_agreed else []
    freed = sum(size for (_, path), size in zip(going, sizes, strict=True) if path in deleted)
    if deleted:
        console.out(f"deleted {len(deleted)}, {size_text(freed)}")
    answer = {
        "found": [{"path": str(p), "bytes": s} for (_, p), s in zip(going, sizes, strict=True)],
        "deleted": [str(path) for path in deleted],
        "bytes": freed,
    }
    words = shlex.join(["specctl", "runs", "clean", *map(str, folders or [Path("runs")]), "--yes"])
    console.done(answer, next=[] if deleted or not going else [words])


def _runs_in(folder: Path, find: Any) -> list[Path]:
    if not folder.is_dir():
        raise FileError(
            f"{folder} is not a folder",
            where=str(folder),
            found="a file" if folder.exists() else "no such folder",
            expected="a run folder, or a folder with runs in it",
            do="specctl runs ls",
        )
    found: list[Path] = find(folder)
    return found


def _asked(console: Console, count: int, size: int) -> bool:
    """What a person at a terminal answers; nobody else is asked."""
    if console.json or console.quiet or not (sys.stdin.isatty() and console.stderr.isatty()):
        return False
    return typer.confirm(f"delete these {count} ({size_text(size)})?", default=False, err=True)


def _delete(console: Console, run: RunStatus, keep: int) -> list[Path]:
    """Delete what the run can do without, holding its folder; a checkpoint is renamed first, so
    that no half-deleted one ever looks like one."""
    from specctl.train.runs.folders import dispensable, read_run
    from specctl.train.saving.lock import locked
    from specctl.train.saving.whole import drop

    if run.holder is not None:
        return []
    gone: list[Path] = []
    with locked(run.path, console):
        # as it stands now, our own hold on it left aside
        for path in dispensable(read_run(run.path), keep, is_ours=True):
            doomed = path.with_name(f".tmp-clean-{path.name.lstrip('.')}")
            path.rename(doomed)
            kept = drop(doomed)
            if kept is not None:
                console.say(f"what else lay in {path} is kept in {kept}")
            gone.append(path)
    return gone
