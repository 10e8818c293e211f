"""`specctl runs tail` and `specctl runs resume`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.commands.runs_common import RunFolder, after
from specctl.core.errors import FileError, SpecctlError

if TYPE_CHECKING:
    from specctl.train.runs.folders import RunStatus

POLL = 0.5  # seconds between two looks at a log that is followed
RESOLVED = ("train-draft", "distill")  # commands that run.yaml alone can continue


def tail(
    console: Console,
    run: RunFolder,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines shown at first.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has finished, or Ctrl-C.")
    ] = False,
) -> None:
    """Show the newest figures of a run, and those to come.

    Example:

      specctl runs tail runs/quickstart -n 5
    """
    from specctl.train.runs.folders import LOG, read_run

    read_run(run)
    if follow and console.json and not console.jsonl:
        raise SpecctlError(
            "--follow shows figures as they come, --json one object at the end",
            where="the command line",
            found="--follow --json",
            expected="one of the two",
            do=f"specctl runs tail {run} --json",
        )
    shown: list[dict[str, Any]] = []
    try:
        for number, new in enumerate(_new_lines(run / LOG)):
            if number == 0:
                new = new[-lines:] if lines else []
            shown += new
            for line in new:
                console.out(_figures(line))
            state = read_run(run).state
            if not follow or (number and state == "finished" and not new):
                break
            time.sleep(POLL)
    except KeyboardInterrupt:
        console.say("stopped following; the run goes on")
    found = read_run(run)
    console.done({"run": str(run), "state": found.state, "lines": shown}, next=after(found))


def _new_lines(path: Path) -> Iterator[list[dict[str, Any]]]:
    """What each look at a log finds that was not there before. A run that resumes rewrites its log
    up to where it goes on; of that, only what is new is given."""
    from specctl.train.log import parse_lines

    known: list[str] = []
    while True:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be half-written
        same = 0
        while same < min(len(known), len(whole)) and known[same] == whole[same]:
            same += 1
        known = whole
        yield parse_lines("\n".join(whole[same:]))


def _figures(line: dict[str, Any]) -> str:
    """A line of the log for people."""
    values = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
    words = [f"{k} {v}" if isinstance(v, bool) else f"{k} {v:.4g}" for k, v in values.items()]
    return f"step {line.get('step')}: " + ", ".join(words)


def resume(
    console: Console,
    run: RunFolder,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="FIELD", help="As the training command takes it."),
    ] = None,
) -> None:
    """Continue an interrupted run as it was started, from wherever you are. A finished one is left
    as it is.

    Examples:

      specctl runs resume runs/quickstart
      specctl runs resume runs/distill --allow restart
    """
    from specctl.cli.main import main
    from specctl.train.runs.folders import read_run

    found = read_run(run)
    if found.holder is not None:
        raise FileError(
            "the run is running",
            where=str(run),
            found=f"process {found.holder.pid} on {found.holder.host}",
            expected="a run that was interrupted",
            do=f"specctl runs tail {run} --follow",
        )
    if found.state == "finished" and kind_of(found) in RESOLVED:
        console.say(f"{run} is finished: left as it is")
        console.done({"run": str(run), "state": found.state}, next=after(found))
        return
    words = resuming_words(found) + [word for name in allow or () for word in ("--allow", name)]
    console.say(shlex.join(["specctl", *words]))
    sys.argv = ["specctl", *words]
    raise typer.Exit(main(words, console))


def kind_of(run: RunStatus) -> str:
    """The command that began a run."""
    return (shlex.split(run.command)[1:] or ["train-draft"])[0]


def resuming_words(run: RunStatus) -> list[str]:
    """The command line that continues a run: its recipe as resolved, its folder, its processes; or,
    for commands that do more than train, the one that began it."""
    words, kind = shlex.split(run.command)[1:], kind_of(run)
    if kind in RESOLVED:
        again = [kind, "--recipe", str(run.path), "--out", str(run.path)]
        return again + _kept(words, ("--gpus", "--processes"))
    out = _kept(words, ("--out", "-o"))
    folder = Path(out[1]) if len(out) == 2 else None
    if folder is None or not (
        folder.is_dir() and run.path.resolve().is_relative_to(folder.resolve())
    ):
        raise SpecctlError(
            "this run was started by a command that names another folder from here",
            where=str(run.path),
            found=run.command,
            expected="to stand in the folder where it was started",
            do=run.command,
        )
    return words


def _kept(words: list[str], options: tuple[str, ...]) -> list[str]:
    """Those of the options that are among the words, each with its value."""
    kept: list[str] = []
    for word, value in zip(words, [*words[1:], ""], strict=True):
        name, equals, inline = word.partition("=")
        if name in options:
            kept += [name, inline if equals else value]
    return kept
