"""`specctl runs`: list, show, follow, resume, compare and clean run folders. No torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.command import command_group
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.app.progress import duration
from specctl.core.errors import FileError, SpecctlError, no_folder, one_of_two
from specctl.core.messages.printable import counted
from specctl.core.messages.sizes import size_text

if TYPE_CHECKING:
    from specctl.train.runs.folders import RunStatus

RUNS = Path("runs")
KEPT = 2  # checkpoints besides the best
POLL = 0.5  # seconds between two looks at a log that is followed
RESOLVED = ("train-draft", "distill")  # commands that run.yaml alone can continue

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Keep = Annotated[
    int, typer.Option("--keep", min=1, help="Newest checkpoints to keep, besides the best.")
]


def ls(
    console: Console,
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder to search, three levels deep.")
    ] = RUNS,
) -> None:
    """List the runs below a folder: state, progress, best tau, age, size.

    Example:

      specctl runs ls
    """
    from specctl.train.runs.folders import find_runs, read_run

    is_new = folder == RUNS and not folder.exists()  # nothing was trained here yet
    if not folder.is_dir() and not is_new:
        raise no_folder(folder, "a folder with run folders in it", "specctl runs ls .")
    runs = [] if is_new else [read_run(path) for path in find_runs(folder)]
    columns = ("run", "state", "step", "of", "tau", "family", "target", "age", "size")
    if runs:
        console.table(columns, [_row(run) for run in runs])
    else:
        console.say(f"no run below {folder}")
    console.done({"runs": [to_json(run) for run in runs]}, next=_after_list(runs))


def show(
    console: Console,
    run: RunFolder,
    hashes: Annotated[
        bool, typer.Option("--hashes/--sizes", help="Check every byte of the checkpoints.")
    ] = True,
) -> None:
    """Show a run: its state, its figures, its checkpoints and whether they are intact.

    Example:

      specctl runs show runs/quickstart
    """
    from specctl.train.runs.folders import read_run

    found = read_run(run, hashes)
    best = f"{found.tau:.3f} at step {found.best_step}" if found.tau is not None else "not measured"
    rows: list[tuple[str, object]] = [
        ("state", _state_text(found)),
        ("recipe", found.recipe.get("name")),
        ("family", found.recipe["drafter"]["family"]),
        ("target", found.recipe["target"]["name"]),
        ("step", f"{found.step:,} of {found.steps:,}"),
        ("best tau", best),
        ("loss", found.last.get("loss")),
        ("trained for", duration(found.seconds)),
        ("last written", f"{duration(found.age)} ago"),
        ("size", size_text(found.bytes)),
        ("command", found.command or "-"),
    ]
    console.table(("field", "value"), rows)
    console.out()
    saves = [
        (s.path.name, size_text(s.bytes), "best" if s.is_best else "", s.wrong or "whole")
        for s in found.saves
    ]
    console.table(("checkpoint", "size", "", "state"), saves)
    console.done(to_json(found) | {"record": found.record}, next=after(found))


def tail(
    console: Console,
    run: RunFolder,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Lines to show at first.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep following until the run ends, or Ctrl-C.")
    ] = False,
) -> None:
    """Show the newest figures of a run, and those to come.

    Example:

      specctl runs tail runs/quickstart -n 5
    """
    from specctl.train.runs.folders import LOG, read_run

    read_run(run)
    if follow and console.json and not console.jsonl:
        wrong = "--follow shows figures as they come, --json one object at the end"
        raise one_of_two(wrong, "--follow --json", f"specctl runs tail {run} --json")
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
    from specctl.train.metrics.log import parse_lines

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
        typer.Option("--allow", metavar="FIELD", help="As in the training command."),
    ] = None,
) -> None:
    """Continue an interrupted run as it was started, from any folder.

    A finished run is left as it is.

    Examples:

      specctl runs resume runs/quickstart
      specctl runs resume runs/distill --allow restart
    """
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
    assert console.rerun is not None, "main() sets it"
    raise typer.Exit(console.rerun(words))


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


def compare(
    console: Console,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two or more run folders.")],
) -> None:
    """Compare runs: where their recipes differ, and their figures side by side.

    Example:

      specctl runs compare runs/a runs/b
    """
    from specctl.recipes.section import flatten
    from specctl.train.runs.folders import read_run

    if len(runs) < 2:
        raise SpecctlError(
            "one run cannot be compared",
            where="the command line",
            found=str(runs[0]),
            expected="two run folders or more",
            do=f"specctl runs show {runs[0]}",
        )
    found = [read_run(path) for path in runs]
    names = [str(path) for path in runs]
    recipes = [flatten(run.recipe) for run in found]
    prose = ("name", "summary", "paper")
    fields = [f for f in dict.fromkeys(k for r in recipes for k in r) if f not in prose]
    differing = {
        field: [recipe.get(field) for recipe in recipes]
        for field in fields
        if any(recipe.get(field) != recipes[0].get(field) for recipe in recipes)
    }
    rows = [(field, *map(_value, values)) for field, values in differing.items()]
    console.table(("recipe", *names), rows or [("no difference", *("" for _ in names))])
    console.out()
    figures = [_compared(run) for run in found]
    measured = {
        name: [row.get(name) for row in figures]
        for name in dict.fromkeys(k for r in figures for k in r)
    }
    shown = [(name, *map(_value, values)) for name, values in measured.items()]
    console.table(("figure", *names), shown)
    console.done({"runs": names, "recipe": differing, "figures": measured})


def _compared(run: RunStatus) -> dict[str, Any]:
    wanted = ("loss", "top1", "simulated_tau", "tokens_per_second")
    return {
        "state": run.state,
        "step": run.step,
        "best tau": run.tau,
        "best step": run.best_step,
        **{name: run.last[name] for name in wanted if name in run.last},
        "seconds": round(run.seconds, 1),
        "bytes": run.bytes,
    }


def to_json(run: RunStatus) -> dict[str, Any]:
    """A run as --json tells it."""
    holder = None if run.holder is None else {"pid": run.holder.pid, "host": run.holder.host}
    return {
        "path": str(run.path),
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "tau": run.tau,
        "best_step": run.best_step,
        "family": run.recipe["drafter"]["family"],
        "target": run.recipe["target"]["name"],
        "seconds": run.seconds,
        "age_seconds": round(run.age, 1),
        "bytes": run.bytes,
        "holder": holder,
        "command": run.command,
        "last": run.last,
        "checkpoints": [
            {"step": s.step, "path": str(s.path), "bytes": s.bytes, "best": s.is_best,
             "damage": s.wrong}
            for s in run.saves
        ],
    }  # fmt: skip


def _row(run: RunStatus) -> tuple[object, ...]:
    tau = "-" if run.tau is None else f"{run.tau:.3f}"
    about = run.recipe["drafter"]["family"], run.recipe["target"]["name"]
    return (
        run.path,
        run.state,
        run.step,
        run.steps,
        tau,
        *about,
        duration(run.age),
        size_text(run.bytes),
    )


def _state_text(run: RunStatus) -> str:
    if run.holder is None:
        return run.state
    return f"{run.state} (process {run.holder.pid} on {run.holder.host})"


def _after_list(runs: list[RunStatus]) -> list[str]:
    waiting = [run for run in runs if run.state == "interrupted"]
    return after((waiting or runs)[0]) if runs else ["specctl train-draft --help"]


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "true", False: "false"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def after(run: RunStatus) -> list[str]:
    """What to do next with a run."""
    if run.state == "running":
        return [command_line("runs", "tail", run.path, "--follow")]
    if run.state == "finished":
        return [command_line("show", run.path / "package")]
    again = ["--allow", "restart"] if run.state == "damaged" else []  # nothing to go on from
    return [command_line("runs", "resume", run.path, *again)]


def clean(
    console: Console,
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Run folders, or folders of runs."),
    ] = None,
    keep: Keep = KEPT,
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
        console.say(f"nothing to delete in {counted(len(found), 'run')}")
    is_agreed = bool(going) and (yes or _is_confirmed(console, len(going), sum(sizes)))
    deleted = [path for run in found for path in _delete(console, run, keep)] if is_agreed else []
    freed = sum(size for (_, path), size in zip(going, sizes, strict=True) if path in deleted)
    if deleted:
        console.out(f"deleted {len(deleted)}, {size_text(freed)}")
    answer = {
        "found": [{"path": str(p), "bytes": s} for (_, p), s in zip(going, sizes, strict=True)],
        "deleted": [str(path) for path in deleted],
        "bytes": freed,
    }
    kept = [] if keep == KEPT else ["--keep", keep]
    words = command_line("runs", "clean", *(folders or [RUNS]), *kept, "--yes")
    console.done(answer, next=[] if deleted or not going else [words])


def _runs_in(folder: Path, find: Any) -> list[Path]:
    if not folder.is_dir():
        raise no_folder(folder, "a run folder, or a folder with runs in it", "specctl runs ls")
    found: list[Path] = find(folder)
    return found


def _is_confirmed(console: Console, count: int, size: int) -> bool:
    """What a person at a terminal answers; others do not see the question."""
    if console.json or console.quiet or not (sys.stdin.isatty() and console.stderr.isatty()):
        return False
    return typer.confirm(f"delete these {count} ({size_text(size)})?", default=False, err=True)


def _delete(console: Console, run: RunStatus, keep: int) -> list[Path]:
    """Delete what the run can do without, holding its folder; a checkpoint is renamed first, so
    that no half-deleted one ever looks like one."""
    from specctl.train.runs.folders import dispensable, read_run
    from specctl.train.saving.integrity import drop
    from specctl.train.saving.lock import locked

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


app = command_group(
    "runs",
    "List, show, follow, resume, compare and clean run folders.",
    (ls, show, tail, resume, compare, clean),
)
