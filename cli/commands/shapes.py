"""`specctl prune --search`: shapes of a draft ranked by predicted tokens per second, here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.app.progress import duration
from specctl.cli.options.recipe_flags import TunedFlags
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import FileError, RecipeError

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.runtime.target.target import Target
    from specctl.train.prune.healing import Healings
    from specctl.train.prune.shapes import Acceptances, Candidate, DraftShape, Fit, Latency, Reached

SEARCH = "Search"
REPORT = "shapes.json"
QUICK_STEPS = 60
PROMPTS, TOKENS = 48, 48  # on which acceptance is measured
ROUNDS, LENGTHS = 24, (1, 2, 3, 5, 8)  # of a timed draft


@dataclass(frozen=True, slots=True)
class SearchFlags:
    """Which shapes are ranked, and where their acceptance comes from."""

    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Cut nothing: rank shapes by predicted tokens/s here.",
            rich_help_panel=SEARCH,
        ),
    ] = False
    depths: Annotated[
        str, typer.Option("--depths", help="Layers of the candidates.", rich_help_panel=SEARCH)
    ] = "1,2,4"
    widths: Annotated[
        str | None,
        typer.Option(
            "--widths",
            help="Channels of the candidates. [default: 1, 3/4 and 1/2 of the target's]",
            rich_help_panel=SEARCH,
        ),
    ] = None
    table: Annotated[
        Path | None,
        typer.Option(
            "--table",
            help='Acceptances as JSON: [{"layers": 2, "width": 256, "alpha": 0.5}, ...]; else '
            "every shape is healed for --heal-steps.",
            rich_help_panel=SEARCH,
        ),
    ] = None
    max_parameters: Annotated[
        int | None,
        typer.Option(
            "--max-parameters",
            min=1,
            max=10**15,
            metavar="INTEGER",
            help="Maximum parameters of the layers.",
            rich_help_panel=SEARCH,
        ),
    ] = None

    def refuse_ignored(self) -> None:
        """The other flags say nothing without --search."""
        for field in fields(SearchFlags):
            value = getattr(self, field.name)
            if not self.search and value != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                raise RecipeError(
                    f"{flag} is ignored without --search",
                    where=flag,
                    found=str(value),
                    expected="--search beside it",
                    do=f"add --search, or leave {flag} out",
                )


def search_shapes(
    console: Console,
    recipe: Recipe,
    out: Path,
    flags: SearchFlags,
    steps: int | None,
    run: TunedFlags,
) -> None:
    """Heal or read acceptances, measure latency, rank; OUT/shapes.json holds all of it."""
    from specctl.train.data.prompts.heldout import heldout_prompts
    from specctl.train.prune.cut import prunable
    from specctl.train.prune.healing import healings
    from specctl.train.prune.shapes import DraftShape, fit_acceptance, measure_latency, rank

    target = replace(TargetChoice.of_recipe(recipe.target), device=run.device).load(console)
    base = prunable(target).module.shape
    widths = flags.widths or ",".join(str(base.hidden_size * n // 4) for n in (4, 3, 2))
    grid = [
        DraftShape(layers, width)
        for layers in _numbers(flags.depths, "--depths", base.num_layers)
        for width in _numbers(widths, "--widths", base.hidden_size)
    ]
    out.mkdir(parents=True, exist_ok=True)
    table = None if flags.table is None else _read_table(flags.table)
    runs = {} if table is not None else healings(recipe, grid, base, steps or QUICK_STEPS)
    healing = _planned(runs, target, out) if table is None else str(flags.table)
    console.say(f"acceptances: {healing}; then drafts of {len(grid)} shapes are timed")
    found = _healed(console, runs, target, out) if table is None else table
    acceptances = fit_acceptance(found)
    prompts = [p.ids for p in heldout_prompts(target, 1)]
    measuring = (target, base, grid, _vocab(recipe.vocab.size, target), prompts, ROUNDS, LENGTHS)
    latency = measure_latency(*measuring, reporter=console)
    ranked = rank(grid, latency, acceptances, flags.max_parameters)
    answer = {"out": str(out), **_answer(latency, acceptances, ranked)}
    (out / REPORT).write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    _show(console, latency, acceptances, ranked)
    following = [] if not ranked else [_cutting(ranked[0].shape, recipe.target.name, out, run)]
    console.done(answer, next=following)


def _cutting(best: DraftShape, target: str, out: Path, run: TunedFlags) -> str:
    """The command that cuts and heals a drafter of that shape, in a folder of its own."""
    words = ["--target", target, "--layers", best.layers, "--width", best.width]
    return command_line("prune", *words, "--out", f"{out}-best", *run.words(("target", "out")))


def _numbers(text: str, where: str, most: int) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > most:
        raise RecipeError(
            f"{where} is not understood",
            where=where,
            found=text,
            expected=f"numbers from 1 to {most:,}, with commas between them",
            do="specctl prune --help",
        )
    return found


def _read_table(file: Path) -> dict[DraftShape, Reached]:
    from specctl.train.prune.shapes import DraftShape, constant

    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return {
            DraftShape(int(r["layers"]), int(r["width"])): constant(float(r["alpha"])) for r in rows
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(
            "the table of acceptances cannot be read",
            where=str(file),
            found=f"{type(error).__name__}: {error}"[:200],
            expected='[{"layers": 2, "width": 256, "alpha": 0.5}, ...]',
            do="correct the file, or leave out --table to measure them",
        ) from error


def _vocab(size: int | str | None, target: Target) -> Any:
    """A draft vocabulary of that size, for timing: which ids it keeps costs nothing."""
    import torch

    from specctl.core.vocab import VocabMap

    if not isinstance(size, int):
        return None
    return VocabMap(torch.arange(size, device=target.device), target.spec.vocab_size)


def _planned(runs: Healings, target: Target, out: Path) -> str:
    """What healing will take, before it begins."""
    from specctl.train.prune.healing import plan_healing

    plan = plan_healing(runs, target, out)
    measuring = f"measured on {PROMPTS} prompts x {TOKENS} tokens"
    if not plan.shapes:
        return f"all {len(runs)} shapes are healed already, {measuring}"
    time = f"{duration(plan.least)} to {duration(plan.most)} by the plan"
    steps = next(iter(runs.values())).train.steps
    return (
        f"{plan.shapes} of {len(runs)} shapes are healed for {steps:,} steps ({time}), {measuring}"
    )


def _healed(
    console: Console, runs: Healings, target: Target, out: Path
) -> dict[DraftShape, Reached]:
    """What is accepted of every shape, cut from the target and healed for a few steps in OUT/LxW,
    on more prompts than a run measures tau on: differences between shapes are small."""
    from specctl.train.assemble import measuring_prompts
    from specctl.train.data.prepare import prepare
    from specctl.train.prune.healing import healed
    from specctl.train.prune.shapes import measure_reached

    found: dict[DraftShape, Reached] = {}
    prompts: list[Sequence[int]] = []
    for shape, drafter in healed(runs, target, out, console):
        if not prompts:  # of the kind that the run measures tau on
            run = runs[shape]
            rows = prepare(run, target, out / shape.name)
            prompts = [*measuring_prompts(run.data, PROMPTS, target, rows)]
        reached = found[shape] = measure_reached(target, drafter, prompts, TOKENS)
        alpha = _with_error(reached.alpha, reached.alpha_error)
        console.say(f"shape {shape.name}: alpha {alpha}")
    return found


def _show(
    console: Console, latency: Latency, acceptances: Acceptances, ranked: list[Candidate]
) -> None:
    rows = [
        (
            f"{c.shape.layers} x {c.shape.width}",
            f"{c.body_parameters:,}",
            f"{1e3 * c.step_seconds:.2f}",
            _alpha(c, c.shape in acceptances.measured),
            str(c.length),
            f"{c.tau:.2f}",
            f"{c.tokens_per_second:.0f}",
        )
        for c in ranked
    ]
    titles = ("layers x width", "parameters", "ms a step", "alpha", "k", "tau", "tokens/s")
    console.table(titles, rows)
    console.prose(
        f"Predicted. The fit of t(depth, width) has {_explained(latency.fit)}, that of alpha "
        f"{_explained(acceptances.fit)}; a shape that was measured is ranked by that alone."
    )


def _answer(latency: Latency, acceptances: Acceptances, ranked: list[Candidate]) -> dict[str, Any]:
    """The ranking, and every number that it follows from."""
    return {
        "ranking": [c.to_json() for c in ranked],
        "latency": {
            "r2": latency.fit.r2,
            "left_out_r2": latency.fit.left_out_r2,
            "coefficients": latency.fit.coefficient_C.tolist(),
            "step_seconds": {shape.name: t for shape, t in latency.measured.items()},
            "verify_seconds": {str(k): v for k, v in latency.verify.items()},
        },
        "acceptance": {
            "r2": acceptances.fit.r2,
            "left_out_r2": acceptances.fit.left_out_r2,
            "coefficients": acceptances.fit.coefficient_C.tolist(),
            "alpha": {s.name: found.alpha for s, found in acceptances.measured.items()},
            "alpha_error": {s.name: r.alpha_error for s, r in acceptances.measured.items()},
            "reached_per_position": {
                s.name: list(r.share_at) for s, r in acceptances.measured.items()
            },
        },
    }


def _alpha(found: Candidate, is_measured: bool) -> str:
    if not is_measured:
        return f"{found.alpha:.3f} by the fit"
    return _with_error(found.alpha, found.alpha_error)


def _with_error(alpha: float, error: float | None) -> str:
    return f"{alpha:.3f}" + ("" if error is None else f" +- {error:.3f}")


def _explained(fit: Fit) -> str:
    """R2 of a fit, and of its points when each is predicted by the others."""
    left_out = "unknown" if fit.left_out_r2 is None else f"{fit.left_out_r2:.3f}"
    return f"R2 {fit.r2:.3f} ({left_out} with each shape left out)"
