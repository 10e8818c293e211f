"""`specctl bench --families`: every trained family under one budget, in one table and one plot.

OUT/NAME            an ordinary run of family NAME; a finished one holds finished.json and is kept
OUT/families.json   the rows        OUT/families.png   speed-ups over plain decoding
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.api.families import check_options, family_infos
from specctl.api.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.app.failures import as_told
from specctl.cli.commands.families_table import Heat, Trained, measure, show_tables
from specctl.cli.options.recipe_flags import RecipeFlags
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import Exit, GateError, RecipeError, did_you_mean
from specctl.recipes.load import RecipeInfo, list_recipes, load_recipe

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe

HOME = "tiny"  # the target whose recipes are compared
SHARED = "eagle"  # the recipe whose data and batches every family is given
OWN = ("steps", "learning_rate", "schedule", "warmup", "decay", "optimizer", "weight_decay")


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """What is trained: which families, for which target, on how much, where."""

    families: str
    target: TargetChoice
    steps: int | None
    sets: tuple[str, ...]
    out: Path


def bench_families(console: Console, budget: TrainingBudget, heat: Heat) -> None:
    """Train what is not trained yet, measure all of it, report; GateError if a family failed."""
    recipes = {name: family_recipe(name, budget) for name in chosen(budget.families)}
    budget.out.mkdir(parents=True, exist_ok=True)
    trained: list[Trained] = []
    errors: dict[str, str] = {}
    for number, (name, recipe) in enumerate(recipes.items(), start=1):
        console.say(f"family {number} of {len(recipes)}: {name}, {recipe.train.steps:,} steps")
        try:
            done = [one.package.parent for one in trained]
            trained.append(train_family(console, name, recipe, budget.out / name, done))
        except Exception as error:  # whatever a family does, the others are measured
            errors[name] = explained(error)
            console.warn(f"{name}: {errors[name]}")
    rows: list[dict[str, Any]] = []
    sizes = dict.fromkeys((None, budget.target.inflate))
    targets = [replace(budget.target, inflate=size).load(console, heat.compiled) for size in sizes]
    for target in targets:
        rows += measure(console, target, trained, heat, explained)
    rows += [{"family": name, "recipe": recipes[name].name, "error": errors[name]}
             for name in errors]  # fmt: skip
    picture = show_tables(console, rows, budget.out)
    result = {
        "rows": rows,
        "targets": [target_json(target) for target in targets],
        "steps": next(iter(recipes.values())).train.steps,
        "out": str(budget.out),
        "picture": None if picture is None else str(picture),
    }
    (budget.out / "families.json").write_text(json.dumps(result, indent=1) + "\n")
    console.result = result
    refuse_failed(rows)
    best = max(rows, key=lambda row: row["speedup"])
    console.done(result, next=[f'specctl generate --draft {best["package"]} "..."'])


def chosen(words: str) -> list[str]:
    """`all` or `medusa,eagle` -> families that train and have a recipe for the embedded target."""
    known = [name for name, info in family_infos().items() if info.trainable and recipes_of(name)]
    wanted = [part.strip() for part in words.split(",") if part.strip()]
    if wanted == ["all"]:
        return known
    for name in wanted or [""]:
        if name not in known:
            raise RecipeError(
                f"no trained family {name!r} with a recipe for target {HOME}",
                where="--families",
                found=words,
                expected="all, or families of `specctl recipes ls` with commas between",
                do=did_you_mean(name, known, "--families all"),
            )
    return list(dict.fromkeys(wanted))


def recipes_of(family: str) -> list[str]:
    """The recipes of a family for the embedded target: its namesake first, then train-draft's own
    choice."""
    names = [r.name for r in shipped() if (r.family, r.target) == (family, HOME)]
    order = (family, RecipeFlags().recipe)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


@cache
def shipped() -> tuple[RecipeInfo, ...]:
    """Every recipe that comes with specctl, read once."""
    return tuple(list_recipes())


def family_recipe(family: str, budget: TrainingBudget) -> Recipe:
    """The family's recipe in one stage on the shared target, data and batches. How fast it learns
    (rate, schedule, optimizer), what it is and how it is served stay its own."""
    tree = load_recipe(SHARED).to_json()
    fields: dict[str, Any] = {
        f"{section}.{key}": value
        for section in ("target", "data", "train")
        for key, value in tree[section].items()
        if section != "train" or key not in OWN
    }
    fields |= {"stages": {}, "target.name": budget.target.name}
    fields["train.steps"] = budget.steps or tree["train"]["steps"]
    named = dict.fromkeys(fields, "--families") | {
        "target.name": "--target", "train.steps": "--budget-steps"
    }  # fmt: skip
    name = recipes_of(family)[0]
    recipe = load_recipe(name, budget.sets, flags=fields, named=named)
    check_options(recipe, name)
    return recipe


def train_family(
    console: Console, name: str, recipe: Recipe, out: Path, done: Sequence[Path]
) -> Trained:
    """The family trained in `out`: kept if that is finished, continued if it was interrupted, begun
    on the rows of a finished one else."""
    from specctl.api.train import train_and_package
    from specctl.export.package.manifest import read_manifest
    from specctl.train.planning.scaling import share_data
    from specctl.train.run import finished_mark, marked_result

    mark = finished_mark(recipe, out)
    if mark is None:
        share_data(done, out)
        result = train_and_package(console, recipe, out, command=["specctl", *sys.argv[1:]])
    else:
        result = marked_result(mark, recipe, out)
        console.say(f"{name}: trained before, kept")
    assert result.package is not None, "a finished run has a package"
    parameters = read_manifest(result.package).parameters
    return Trained(name, recipe, result.package, parameters, result.seconds)


def explained(error: Exception) -> str:
    """An error in one line for a table. An interruption is none: it ends the command."""
    told = as_told(error)
    if told is not None and told.exit == Exit.INTERRUPTED:
        raise error
    text = f"{type(error).__name__}: {error}" if told is None else told.text()
    return " ".join(text.split())[:300]


def refuse_failed(rows: Sequence[dict[str, Any]]) -> None:
    """GateError (exit 8) naming the families that have no figures."""
    failed = {row["family"]: row["error"] for row in rows if row["error"] is not None}
    if failed:
        raise GateError(
            f"{len(failed)} families could not be compared: {', '.join(failed)}",
            where="--families",
            found="; ".join(f"{name}: {why}" for name, why in failed.items())[:600],
            expected="figures for every family",
            do="mend or leave out what failed, then: specctl " + " ".join(sys.argv[1:]),
        )
