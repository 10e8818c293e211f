"""`specctl plan --scaling`: a grid of small runs, its scaling law, the price of more tau."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe


def plan_scaling(console: Console, recipe: Recipe, out: Path) -> None:
    """Run the grid of a recipe in `out`, print the law, and write scaling.json and scaling.png."""
    from specctl.cli.options.target_choice import TargetChoice
    from specctl.train.planning.scaling import fit, grid, report, run_grid, save_picture

    cells, part = grid(recipe, out), recipe.target
    target = TargetChoice(part.name, part.revision, part.dtype, inflate=part.inflate).load(console)
    points = run_grid(cells, target, console, ["specctl", *sys.argv[1:]])
    law = fit(points)
    found = report(points, law)
    rows = [
        (f"{c.layers} x {c.width}", f"{p['parameters']:,}", f"{p['tokens']:,}",
         f"{p['tau']:.3f}", f"{p['fitted']:.3f}")
        for c, p in zip(cells, found["points"], strict=True)
    ]  # fmt: skip
    console.table(("layers x width", "parameters", "tokens", "tau", "fitted"), rows)
    error = "not defined" if law.error is None else f"{law.error:.3f}"
    console.out(
        f"tau = {law.intercept:.3f} {law.per_tokens:+.4f} log(tokens) {law.per_parameters:+.4f} "
        f"log(parameters) | R2 {law.r2:.3f} | leave-one-out error {error}"
    )
    for line in prices(found):
        console.out(line)
    (out / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
    picture = save_picture(points, law, out / "scaling.png")
    answer = {**found, "out": str(out), "picture": None if picture is None else str(picture)}
    console.done(answer, next=[f"specctl distill --target {part.name}"])


def prices(found: dict[str, Any]) -> list[str]:
    """What the next tenth of tau costs, one line per resource."""
    lines = []
    for name, price in found["next_tenth"].items():
        told = f"the next 0.1 of tau by {name}: "
        if price is None:
            lines.append(told + "not for any amount, as far as this grid can tell")
        else:
            told += f"{price['factor']:,.2f} times as many ({price['total']:,.0f})"
            lines.append(told)
    return lines
