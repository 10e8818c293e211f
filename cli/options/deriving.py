"""`--time`: the recipe of a training command, derived for its target, data and this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.api.derive import (
    DERIVED,
    derive_recipe,
    is_derivable,
    is_foreign,
    keep,
    kept,
    seconds_of,
)
from specctl.api.preflight import check_run
from specctl.cli.app.console import Console
from specctl.cli.app.launch import is_launched
from specctl.cli.app.progress import duration
from specctl.core.errors import FileError
from specctl.train.saving.run_file import RECORD, recorded

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.train.planning.derive import Derived

__all__ = ["DERIVED", "Deriving", "show"]

USUAL = "40m"


@dataclass(frozen=True, slots=True)
class Deriving:
    """What decides whether a recipe is derived: its name as it was given, the value of --time, and
    the processes that share a batch."""

    given: str
    time: str | None
    processes: int = 1

    def recipe(self, console: Console, recipe: Recipe, out: Path, is_kept: bool) -> Recipe:
        """The recipe itself, or the one that is derived from it: as the run in `out` has it, else
        found now. `is_kept`: for a run in that folder, which will find it there."""
        seconds = None if self.time is None else seconds_of(self.time)
        found = kept(recipe, out, seconds)
        if found is not None:
            console.say(f"recipe derived before, in {out}")
            return found
        if is_launched() or not self._is_wanted(recipe, out):
            return recipe
        check_run(recipe, out)
        time = self.time or USUAL
        console.say(f"deriving {recipe.name} for {recipe.target.name}, to be done in {time}")
        derived = derive_recipe(
            recipe=recipe, time=time, processes=self.processes, progress=console
        )
        show(console, derived)
        if is_kept:
            keep(derived, out)
        return derived.recipe

    def _is_wanted(self, recipe: Recipe, out: Path) -> bool:
        begun = recorded(out / RECORD) is not None
        if self.time is not None and begun:
            raise FileError(
                f"{out} holds a run whose recipe was not derived",
                where="--time",
                found=str(out / RECORD),
                expected="a new folder",
                do="choose another --out, or leave --time out to go on with it",
            )
        if self.time is not None:
            return True
        return not begun and is_foreign(recipe, self.given) and is_derivable(recipe)


def show(console: Console, derived: Derived) -> None:
    """Every choice with its reason, and what the parts of the run will take."""
    console.table(
        ("chosen", "value", "why"),
        [(choice.field, _text(choice.value), choice.reason) for choice in derived.choices],
    )
    low, high = (sum(part.seconds_range[i] for part in derived.parts) for i in (0, 1))
    console.out(f"expected: {duration(low)} to {duration(high)}, of {duration(derived.seconds)}")
    for part in derived.parts:
        low, high = part.seconds_range
        console.out(f"  {part.name}, {part.amount}: {duration(low)} to {duration(high)}")


def _text(value: object) -> str:
    return (
        f"{value:,}" if isinstance(value, int) else "the target's" if value is None else str(value)
    )
