"""What train-draft, distill and quickstart share: run a recipe, package the best, say so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.launch import check_gpus, is_launched, relaunch, watch_front
from specctl.cli.app.memory import peak_memory, peak_text
from specctl.cli.app.progress import duration
from specctl.cli.commands.plan import show_plans, without_dry_run
from specctl.cli.options.measurement import FORCED, Measurement, run_words
from specctl.cli.options.preflight import (
    BEFORE,
    check_allowed,
    check_fits,
    check_made_for,
    check_out,
    check_run,
)
from specctl.cli.options.recipe_flags import TrainingFlags
from specctl.cli.options.target_choice import go_offline
from specctl.core.errors import RecipeError, SpecctlError
from specctl.recipes.stages import runs_of

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.export.package.manifest import Manifest
    from specctl.recipes.schema import Recipe
    from specctl.runtime.measure.reporter import Reporter
    from specctl.runtime.target.target import Target
    from specctl.train.run import RunResult


GATE_PROMPTS = 4


def run_training(
    console: Console,
    flags: TrainingFlags,
    about: Callable[[RunResult], dict[str, Any]] = lambda result: {},
) -> None:
    """A whole training command, from its flags to the Next lines. `about` says more of the result
    and returns it for --json."""
    recipe = flags.load()
    out = flags.folder(recipe)
    if flags.offline:
        go_offline()
    check_allowed(flags.allow or ())
    if is_launched():
        watch_front()
    processes, is_cpu = _processes(flags, min(each.train.rows for each in runs_of(recipe)))
    allow = [name for name in flags.allow or () if name not in BEFORE]
    check_out(out)
    check_run(recipe, out)
    if not is_launched() and not flags.dry_run:
        if "recipe" not in (flags.allow or ()):
            check_made_for(console, recipe, flags)
        if "memory" not in (flags.allow or ()):
            check_fits(recipe, out, processes)
    if flags.dry_run:
        console.done(show_plans(console, recipe, out), next=[without_dry_run()])
        return
    if processes > 1 and not is_launched():
        code = relaunch(sys.argv[1:], processes, is_cpu, recipe.train.parallel)
        console.is_answered = True  # by the first process
        raise typer.Exit(code)
    console.say(f"{recipe.name}: {recipe.drafter.family} for {recipe.target.name}, in {out}")
    result = train_and_package(console, recipe, out, flags.resume, allow)
    finish(console, recipe, result, about(result) if console.is_main else {})


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


def packaged(drafter: Drafter, target: Target, folder: Path, **about: Any) -> Manifest:
    """Write a package, then read it back and decode with it: what was trained is what is served,
    or GateError."""
    from specctl.export.package.check import check_package
    from specctl.export.package.folder import save_package
    from specctl.train.data.heldout import heldout_prompts

    manifest = save_package(drafter, target, folder, **about)
    count = GATE_PROMPTS if target.can_run else 0
    prompts = [prompt.ids for prompt in heldout_prompts(target, GATE_PROMPTS)][:count]
    check_package(folder, target, reference=drafter, prompts=prompts)
    return manifest


def train_and_package(
    console: Reporter, recipe: Recipe, out: Path, resume: bool = True, allow: Sequence[str] = ()
) -> RunResult:
    """Train, and write OUT/package from the checkpoint with the best measured tau; then OUT/FORMAT
    for each further format of the recipe."""
    from specctl.train.runs.stages import train_recipe

    others = other_formats(recipe)
    command = ["specctl", *sys.argv[1:]]

    def package(
        drafter: Drafter, target: Target, folder: Path, acceptance: Mapping[str, Any] | None
    ) -> Manifest:
        manifest = packaged(
            drafter,
            target,
            folder,
            serve=recipe.to_json()["serve"],
            recipe_digest=recipe.digest,
            acceptance=packaged_acceptance(
                acceptance, recipe, target, run_words(recipe, target, out)
            ),
            command=command,
        )
        same = ", same acceptance as in training" if target.can_run else ""
        console.say(f"package: read back, every tensor equal{same}")
        for form in others:
            from specctl.export.formats import export

            export(folder, form, out / form, target)
            console.say(f"{out / form}: the drafter as {form}, loaded back and compared")
        return manifest

    return train_recipe(
        recipe,
        out,
        resume=resume,
        reporter=console,
        command=command,
        allow=allow,
        package=package,
        load=load_initial,
    )


def load_initial(name: str, target: Target) -> Drafter:
    """The drafter that drafter.init names; of a package, in the very numbers that were saved. It
    may have been made for another target of the same tokenizer: training makes it this one's."""
    from specctl.export.package.compat import ALLOWABLE
    from specctl.export.package.find import Kind, load_found, locate
    from specctl.export.package.load import read_package

    found = locate(name)
    if found.kind is Kind.PACKAGE and found.folder is not None:
        return read_package(found.folder, target, sorted({*ALLOWABLE} - {"tokenizer"}))
    return load_found(found, target, ("padding",))


def other_formats(recipe: Recipe) -> list[str]:
    """The formats of the recipe beside the package; one that cannot hold the family is refused
    before anything is trained."""
    from specctl.export.formats import formats

    wanted: list[str] = [name for name in recipe.export.formats if name != "specctl"]
    family = recipe.drafter.family
    for name in wanted:
        if not formats()[name].holds(family):
            fits = [n for n, form in formats().items() if form.holds(family)]
            raise RecipeError(
                f"format {name} cannot hold a drafter of family {family}",
                where="export.formats",
                found=name,
                expected="one of " + ", ".join(fits),
                do="--set export.formats=[specctl]",
            )
    return wanted


def packaged_acceptance(
    measured: Mapping[str, Any] | None, recipe: Recipe, target: Target, words: Sequence[str]
) -> dict[str, Any] | None:
    """What the training loop measured, as a package records it; `words` run it again."""
    if measured is None:
        return None
    found = Measurement(
        tau=measured["tau"],
        accepted_per_position=measured["accepted_per_position"],
        num_prompts=measured["prompts"],
        new_tokens=recipe.train.tau_tokens,
        batch=measured["prompts"],
        is_forced=measured.get("is_forced", False),
    )
    return found.record_of_run(recipe, target, words)


def finish(
    console: Console, recipe: Recipe, result: RunResult, more: Mapping[str, Any] | None = None
) -> None:
    """The last line of a run: where it is, its hash, its acceptance, its time. `more` goes into the
    answer of --json."""
    from specctl.export.package.manifest import read_manifest

    package = result.package if result.package is not None else result.out / "package"
    if not console.is_main:
        return
    manifest = read_manifest(package)
    tau = "not measured" if result.tau is None else f"{result.tau:.2f}"
    how = "held-out"
    if manifest.acceptance is not None and manifest.acceptance.data == FORCED:
        how = "from alphas, not decoded"
    checkpoint = result.best_checkpoint or result.out
    console.out(
        f"checkpoint {checkpoint} (sha256 {manifest.digest[:12]}) | acceptance tau {tau} "
        f"({how}, k={recipe.serve.length}) | {duration(result.seconds)} | {peak_text()}"
    )
    answer = {
        "out": str(result.out),
        "package": str(package),
        "checkpoint": str(checkpoint),
        "sha256": manifest.digest,
        "tau": result.tau,
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "peak_bytes": peak_memory(),
        "parameters": manifest.parameters,
        **({} if result.target is None else {"target": str(result.target)}),
        "exports": {name: str(result.out / name) for name in other_formats(recipe)},
    }
    target = recipe.target.name if result.target is None else str(result.target)
    following = [
        f"specctl verify {package} --target {target} --level lossless",
        f'specctl generate --target {target} --draft {package} --compare "..."',
    ]
    console.done(answer | dict(more or {}), next=following)
