"""How long does each family's recipe train on the embedded target? Rehearsed: five steps and 64
prompts of the run itself, timed in its parts (`specctl plan --rehearse`); `plan_accuracy.py` says
how far such plans are from whole runs.

    python benchmarks/recipe_times.py
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from plan_accuracy import answer, planned

from specctl.cli.commands.bench_families import chosen, recipes_of
from specctl.recipes.load import load_recipe
from specctl.recipes.stages import stages_of

LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe and what its rehearsal promises."""

    recipe: str
    family: str
    steps: int
    seconds: float
    memory: float


def rehearsed(name: str) -> Row:
    recipe = load_recipe(name)
    plan = answer(["plan", "--rehearse", "--recipe", name])
    figures = planned(plan)
    return Row(name, recipe.drafter.family, recipe.train.steps, figures.seconds, figures.memory)


def line(row: Row) -> str:
    memory = f"{row.memory / 2**20:,.0f} MiB"
    return f"| {row.recipe} | {row.family} | {row.steps} | {row.seconds:.0f} | {memory} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--families", default="all", help="names, with commas between")
    options.add_argument("--limit", type=float, default=LIMIT, help="seconds")
    options.add_argument("--json", action="store_true", help="print JSON only")
    given = options.parse_args()
    every = [recipes_of(family)[0] for family in chosen(given.families)]
    names = [name for name in every if not stages_of(load_recipe(name))]
    print(f"pipelines are not rehearsed: {sorted(set(every) - set(names))}", file=sys.stderr)
    if not given.json:
        print("| recipe | family | steps | seconds | memory |\n|---|---|---|---|---|", flush=True)
    rows = []
    for name in names:
        rows.append(rehearsed(name))
        if not given.json:
            print(line(rows[-1]), flush=True)
    slow = [row.recipe for row in rows if row.seconds > given.limit]
    found: dict[str, Any] = {"rows": [asdict(row) for row in rows], "too_slow": slow}
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"longer than {given.limit:.0f} s: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main()
