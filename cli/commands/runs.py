"""`specctl runs`: list, show, follow, resume, compare and clean run folders. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.command import command
from specctl.cli.app.console import Console
from specctl.cli.app.memory import size_text
from specctl.cli.app.progress import duration
from specctl.cli.app.switches import Command, Group
from specctl.cli.commands.runs_clean import clean
from specctl.cli.commands.runs_common import RunFolder, after
from specctl.cli.commands.runs_follow import resume, tail
from specctl.core.errors import FileError, SpecctlError

if TYPE_CHECKING:
    from specctl.train.runs.folders import RunStatus

RUNS = Path("runs")

app = typer.Typer(
    cls=Group,
    name="runs",
    help="List, show, follow, resume, compare and clean run folders.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def ls(
    console: Console,
    folder: Annotated[Path, typer.Argument(help="Where to look, three levels down.")] = RUNS,
) -> None:
    """List the runs below a folder: state, progress, best tau, age, size.

    Example:

      specctl runs ls
    """
    from specctl.train.runs.folders import find_runs, read_run

    is_new = folder == RUNS and not folder.exists()  # nothing was trained here yet
    if not folder.is_dir() and not is_new:
        raise FileError(
            f"{folder} is not a folder",
            where=str(folder),
            found="a file" if folder.exists() else "no such folder",
            expected="a folder with run folders in it",
            do="specctl runs ls .",
        )
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
    """Show a run: how it stands, its figures, its checkpoints and whether they are whole.

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


def compare(
    console: Console,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two run folders or more.")],
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


def _everywhere(console: Console) -> None:
    """List, show, follow, resume, compare and clean run folders."""
    del console


app.callback()(command(_everywhere, "runs"))
for _body in (ls, show, tail, resume, compare, clean):
    app.command(_body.__name__, cls=Command)(command(_body, f"runs-{_body.__name__}"))
