"""`specctl plan --scaling`: a grid of small runs, and the law of tau that they follow."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.options.recipe_flags import PlanFlags
from specctl.cli.options.target_choice import TargetChoice

if TYPE_CHECKING:
    from specctl.recipes.schema import TargetPart
    from specctl.train.planning.scaling import Cell


def plan_scaling(
    console: Console, cells: Sequence[Cell], part: TargetPart, out: Path, run: PlanFlags
) -> None:
    """Run the cells of a grid in `out`, print the law, and write scaling.json and scaling.png."""
    from specctl.train.planning.scaling import (
        fit,
        measure_batches,
        report,
        run_grid,
        save_picture,
    )

    target = TargetChoice.of_recipe(part).load(console)
    points = run_grid(cells, target, console, ["specctl", *sys.argv[1:]])
    law = fit(points)
    best = max(zip(points, cells, strict=True), key=lambda pair: pair[0].tau)[1]
    speeds = measure_batches(best, target) if target.can_run else []
    found = report(points, law, speeds)
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
    if found["batches"] is not None:
        by_batch = found["batches"]["law"]
        measured = ", ".join(f"{s.batch}: {s.tokens_per_second:,.0f}" for s in speeds)
        console.out(
            f"tokens/s = {by_batch['intercept']:.1f} {by_batch['per_batch']:+.1f} log(batch) | "
            f"R2 {by_batch['r2']:.3f} | measured with {best.folder.name} {measured}"
        )
    for line in prices(found):
        console.out(line)
    (out / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
    picture = save_picture(points, law, out / "scaling.png")
    answer = {**found, "out": str(out), "picture": None if picture is None else str(picture)}
    words = TargetChoice.of_recipe(part).training_words()
    data = [word for name in run.data or () for word in ("--data", name)]
    console.done(answer, next=[command_line("distill", *words, *data)])


def prices(found: dict[str, Any]) -> list[str]:
    """What the next tenth of tau costs, one line per resource."""
    lines = []
    for name, price in found["next_tenth"].items():
        line = f"the next 0.1 of tau by {name}: "
        if price is None:
            lines.append(line + "not for any amount, as far as this grid can tell")
        else:
            line += f"{price['factor']:,.2f} times as many ({price['total']:,.0f})"
            lines.append(line)
    return lines
