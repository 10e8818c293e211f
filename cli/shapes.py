"""`specctl prune --search`: shapes of a draft ranked by predicted tokens per second, here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.console import Console
from specctl.cli.cutting import recipe_target
from specctl.recipes.errors import FileError, RecipeError

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.runtime.target import Target
    from specctl.train.prune.shapes import Acceptances, Candidate, DraftShape, Latency

SEARCH = "Search"
REPORT = "shapes.json"
QUICK_STEPS = 60
PROMPTS = 4
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
            help="Their channels. [default: 1, 3/4 and 1/2 of the target's]",
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
            help="Of the layers, at most.",
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
    console: Console, recipe: Recipe, out: Path, flags: SearchFlags, steps: int | None
) -> None:
    """Measure latency, heal or read acceptances, rank; OUT/shapes.json holds all of it."""
    from specctl.train.data.heldout import heldout_prompts
    from specctl.train.prune.cut import prunable
    from specctl.train.prune.shapes import DraftShape, fit_acceptance, measure_latency, rank

    target = recipe_target(console, recipe)
    base = prunable(target).module.shape
    widths = flags.widths or ",".join(str(base.hidden_size * n // 4) for n in (4, 3, 2))
    grid = [
        DraftShape(layers, width)
        for layers in _numbers(flags.depths, "--depths", base.num_layers)
        for width in _numbers(widths, "--widths", base.hidden_size)
    ]
    out.mkdir(parents=True, exist_ok=True)
    if flags.table is not None:
        alphas = _read_table(flags.table)
    else:
        alphas = _healed(console, recipe, target, grid, out, steps or QUICK_STEPS)
    console.say(f"measuring {len(grid)} shapes in the engine")
    prompts = [p.ids for p in heldout_prompts(target, PROMPTS)]
    latency = measure_latency(target, base, grid, _vocab(recipe, target), prompts, ROUNDS, LENGTHS)
    acceptances = fit_acceptance(alphas)
    ranked = rank(grid, latency, acceptances, flags.max_parameters)
    _finish(console, recipe, out, latency, acceptances, ranked)


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


def _read_table(file: Path) -> dict[DraftShape, float]:
    from specctl.train.prune.shapes import DraftShape

    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return {DraftShape(int(r["layers"]), int(r["width"])): float(r["alpha"]) for r in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(
            "the table of acceptances cannot be read",
            where=str(file),
            found=f"{type(error).__name__}: {error}"[:200],
            expected='[{"layers": 2, "width": 256, "alpha": 0.5}, ...]',
            do="correct the file, or leave out --table to measure them",
        ) from error


def _vocab(recipe: Recipe, target: Target) -> Any:
    """A draft vocabulary of the recipe's size, for timing: which ids it keeps costs nothing."""
    import torch

    from specctl.drafters.parts.vocab import VocabMap

    size = recipe.vocab.size
    if not isinstance(size, int):
        return None
    return VocabMap(torch.arange(size, device=target.device), target.spec.vocab_size)


def _healed(
    console: Console,
    recipe: Recipe,
    target: Target,
    grid: list[DraftShape],
    out: Path,
    steps: int,
) -> dict[DraftShape, float]:
    """alpha of every shape, cut from the target and healed for a few steps in OUT/LxW."""
    from specctl.train.prune.cut import prunable
    from specctl.train.prune.shapes import alpha_of
    from specctl.train.run import train_draft

    alphas: dict[DraftShape, float] = {}
    base, first = prunable(target).module.shape, None
    for shape in grid:
        folder = out / f"{shape.layers}x{shape.width}"
        if first is not None and not (folder / "data").exists():
            shutil.copytree(first / "data", folder / "data")
        first = first or folder
        result = train_draft(
            quick_recipe(recipe, shape.options(base), steps),
            folder,
            target=target,
            reporter=console,
        )
        assert result.tau is not None, "the last step measures tau"
        alphas[shape] = alpha_of(result.tau, recipe.serve.length)
    return alphas


def quick_recipe(recipe: Recipe, options: Mapping[str, Any], steps: int) -> Recipe:
    """The recipe for one shape: cut from the target, healed briefly."""
    kept = {k: v for k, v in recipe.drafter.options.items() if k != "from_layers"}
    part = recipe.drafter.model_copy(update={"init": "target", "options": {**kept, **options}})
    train = recipe.train.model_copy(update={"steps": steps, "tau_every": steps})
    return recipe.model_copy(update={"drafter": part, "train": train})


def _finish(
    console: Console,
    recipe: Recipe,
    out: Path,
    latency: Latency,
    acceptances: Acceptances,
    ranked: list[Candidate],
) -> None:
    rows = [
        (
            f"{c.shape.layers} x {c.shape.width}",
            f"{c.body_parameters:,}",
            f"{1e3 * c.step_seconds:.2f}",
            f"{c.alpha:.3f}",
            str(c.length),
            f"{c.tau:.2f}",
            f"{c.tokens_per_second:.0f}",
        )
        for c in ranked
    ]
    titles = ("layers x width", "parameters", "ms a step", "alpha", "k", "tau", "tokens/s")
    console.table(titles, rows)
    console.out(
        f"predicted; the fit of t(depth, width) has R2 {latency.fit.r2:.3f}, of alpha "
        f"{acceptances.fit.r2:.3f}"
    )
    answer = {
        "out": str(out),
        "ranking": [c.to_json() for c in ranked],
        "latency": {
            "r2": latency.fit.r2,
            "coefficients": latency.fit.coefficient_C.tolist(),
            "step_seconds": _by_shape(latency.measured),
            "verify_seconds": {str(k): v for k, v in latency.verify.items()},
        },
        "acceptance": {
            "r2": acceptances.fit.r2,
            "coefficients": acceptances.fit.coefficient_C.tolist(),
            "alpha": _by_shape(acceptances.measured),
        },
    }
    (out / REPORT).write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    following = []
    if ranked:
        best = ranked[0].shape
        words = f"--layers {best.layers} --width {best.width}"
        following = [f"specctl prune --target {recipe.target.name} {words} --out {out}-best"]
    console.done(answer, next=following)


def _by_shape(values: Mapping[DraftShape, float]) -> dict[str, float]:
    return {f"{shape.layers}x{shape.width}": value for shape, value in values.items()}
