"""What the training commands share: flags to a call of train(), its result to the last lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specctl.api.arguments.initial_shape import following_init
from specctl.api.derive import is_derived, read_by
from specctl.api.measured.measurement import ESTIMATED
from specctl.api.preflight import (
    BEFORE,
    check_allowed,
    check_fits,
    check_made_for,
    check_out,
    check_run,
)
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line, with_text
from specctl.cli.app.launch import check_gpus, is_launched, relaunch, use_device, watch_front
from specctl.cli.app.memory import peak_memory, peak_text
from specctl.cli.app.progress import duration
from specctl.cli.commands.plan import show_plans, without_dry_run
from specctl.cli.options.deriving import Deriving
from specctl.cli.options.recipe_flags import RecipeFlags, TrainingFlags
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import SpecctlError
from specctl.core.storage.hub_access import go_offline
from specctl.recipes.stages import runs_of
from specctl.train.runs.kept import kept_in

if TYPE_CHECKING:
    from specctl.api.train import TrainResult
    from specctl.recipes.schema import Recipe


def run_training(
    console: Console,
    flags: TrainingFlags,
    about: Callable[[TrainResult], dict[str, Any]] = lambda result: {},
    data: str | None = None,
) -> None:
    """A whole training command, from its flags to the Next lines. `about` says more of the result
    and returns it for --json; `data`: what a plan calls the data, where they are a copy."""
    recipe = flags.load()
    out = flags.folder(recipe.target.name, recipe.name)
    check_out(out)
    if not flags.dry_run:
        console.kept = partial(kept_in, out)
    use_device(flags.device, flags.gpus)
    if flags.offline:
        go_offline()
    check_allowed(flags.allow or ())
    recipe = following_init(recipe, console.warn)
    if is_launched():
        watch_front()
    has_more = "data" in (flags.allow or ())
    count = max(flags.gpus, flags.processes)
    deriving = Deriving(recipe, out, flags.recipe, flags.time, count, has_more)
    pace = None
    if "recipe" not in (flags.allow or ()) and flags.dry_run:
        recipe, pace = deriving.of_plan(console)
    elif "recipe" not in (flags.allow or ()):
        recipe = deriving.of_run(console)
    processes, is_cpu = _processes(flags, min(each.train.rows for each in runs_of(recipe)))
    allow = [name for name in flags.allow or () if name not in BEFORE]
    if flags.dry_run:
        check_run(recipe, out)
        planned = show_plans(console, recipe, out, pace=pace, data=data)
        console.done(planned, next=[without_dry_run()])
        return
    if not is_launched():
        check_run(recipe, out)
        _check_before(console, flags, recipe, out, processes)
    if processes > 1 and not is_launched():
        code = relaunch(sys.argv[1:], processes, is_cpu, recipe.train.parallel)
        console.is_answered = True  # by the first process
        raise typer.Exit(code)
    from specctl.api.train import train

    result = train(
        None,
        recipe,
        out=out,
        resume=flags.resume,
        allow=allow,
        progress=console,
        command=["specctl", *sys.argv[1:]],
    )
    finish(console, result, about(result) if console.is_main else {})


def _check_before(
    console: Console, flags: TrainingFlags, recipe: Recipe, out: Path, processes: int
) -> None:
    """Whether the recipe was made for this target and the run fits, unless that is allowed."""
    from specctl.train.distributed.in_step import check_spread

    allowed = flags.allow or ()
    for each in runs_of(recipe):
        check_spread(each.target, each.data, each.train, processes)
    if "recipe" not in allowed and not is_derived(recipe.origin):
        is_chosen = flags.recipe != RecipeFlags().recipe or flags.init is not None
        check_made_for(recipe, flags.recipe, console.warn, flags.FAMILIES, is_chosen)
    if "memory" not in allowed:
        check_fits(recipe, out, processes)


def _processes(flags: TrainingFlags, rows: int) -> tuple[int, bool]:
    """How many processes share the `rows` of the smallest batch, and whether on the CPU."""
    from specctl.train.job import check_rows

    if flags.gpus > 1 and flags.processes > 1:
        raise SpecctlError(
            "--gpus and --processes were both given",
            where="the command line",
            found=f"--gpus {flags.gpus} --processes {flags.processes}",
            expected="one of the two: one process runs on each GPU",
            do=f"--gpus {flags.gpus}",
        )
    if flags.gpus > 1 and not is_launched():
        check_gpus(flags.gpus)
    check_rows(rows, max(flags.gpus, flags.processes))
    return (flags.gpus, False) if flags.gpus > 1 else (flags.processes, True)


def finish(console: Console, result: TrainResult, more: Mapping[str, Any] | None = None) -> None:
    """The last line of a run: where it is, its hash, its acceptance, its time. `more` goes into the
    answer of --json."""
    if not console.is_main:
        return
    answer, package = result.to_json(), result.package
    tau = "not measured" if result.tau is None else f"{result.tau:.2f}"
    recorded = result.manifest.acceptance
    is_estimate = recorded is not None and recorded.data == ESTIMATED
    how = "from alphas, not decoded" if is_estimate else "held-out"
    console.out(
        f"checkpoint {answer['checkpoint']} (sha256 {answer['sha256'][:12]}) | acceptance tau "
        f"{tau} ({how}, k={result.recipe.serve.length}){result.on_suite()} | "
        f"{duration(result.run.seconds)} | {peak_text()}"
    )
    made = TargetChoice(str(result.target))  # what the run made of its target is whole by itself
    target = made if result.run.target is not None else TargetChoice.of_recipe(result.recipe.target)
    word = result.recipe.train.tau_suite
    suite = () if word is None else ("--suite", word)
    following = [
        command_line("bench", package, *target.words(), *suite),
        command_line("verify", package, *target.words(but=("dtype",)), "--level", "lossless"),
        with_text("generate", *target.words(), "--draft", package, "--compare"),
    ]
    if readers := read_by(result.out):
        to = readers[0]
        following.append(command_line("export", package, "--to", to, "--out", f"{result.out}-{to}"))
    console.done({**answer, "peak_bytes": peak_memory(), **(more or {})}, next=following)
