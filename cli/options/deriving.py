"""`--time`: the recipe of a training command, derived for its target, data and this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.api.derive import RECORD as CHOICES
from specctl.api.derive import (
    derive_recipe,
    is_derivable,
    is_foreign,
    keep,
    kept,
    longer,
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
    from specctl.train.planning.pace import Pace
    from specctl.train.planning.work import Part

USUAL = "40m"
ENGINES = "read by"  # the line that says which engines will read the drafter


@dataclass(frozen=True, slots=True)
class Deriving:
    """What decides whether a recipe is derived: its name as it was given, the value of --time, the
    processes that share a batch, whether a run may go on with more data, and what plans the parts
    that are done before the run in the same time."""

    given: str
    time: str | None
    processes: int = 1
    allows_more: bool = False
    before: Callable[[], Sequence[Part]] = tuple

    def of_run(self, console: Console, recipe: Recipe, out: Path) -> Recipe:
        """The recipe of a run in `out`: derived before, derived now and kept there, or as it is."""
        found = self._kept(console, recipe, out)
        if found is not None or is_launched():
            return found or recipe
        derived = self.now(console, recipe, out)
        if derived is None:
            return recipe
        keep(derived, out, recipe)
        return derived.recipe

    def of_plan(self, console: Console, recipe: Recipe, out: Path) -> tuple[Recipe, Pace | None]:
        """The same where nothing is to be written, with the pace that was measured for it."""
        found = self._kept(console, recipe, out)
        if found is not None:
            return found, None
        derived = self.now(console, recipe, out)
        return (recipe, None) if derived is None else (derived.recipe, derived.pace)

    def now(self, console: Console, recipe: Recipe, out: Path) -> Derived | None:
        """The recipe derived and shown; None where that is not wanted."""
        more = self._longer(recipe, out)
        if more is None and not self._is_wanted(recipe, out):
            return None
        recipe = recipe if more is None else more
        check_run(recipe, out)
        time = self.time or USUAL
        done = "to be done in" if more is None else f"as in {out}, with more data, in all in"
        console.say(f"deriving {recipe.name} for {recipe.target.name}, {done} {time}")
        derived = derive_recipe(
            recipe=recipe,
            time=time,
            processes=self.processes,
            before=self.before(),
            progress=console,
        )
        show(console, derived)
        return derived

    def _kept(self, console: Console, recipe: Recipe, out: Path) -> Recipe | None:
        if self._longer(recipe, out) is not None:
            return None
        found = kept(recipe, out, None if self.time is None else seconds_of(self.time))
        if found is not None:
            console.say(f"recipe: as it was derived for the run in {out}")
        elif (out / CHOICES).exists():
            other = "another target, method or time, or of other data"
            console.say(f"recipe: {out / CHOICES} is of {other}: not used")
        return found

    def _longer(self, recipe: Recipe, out: Path) -> Recipe | None:
        """The sizes of the run, where it is to go on for a longer time."""
        if not self.allows_more or self.time is None:
            return None
        return longer(recipe, out, seconds_of(self.time))

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
    engines = derived.engines
    console.table(
        ("chosen", "value", "why"),
        [
            *((choice.field, _text(choice.value), choice.reason) for choice in derived.choices),
            *(
                ()
                if engines is None
                else [(ENGINES, ", ".join(engines.reads) or "none", engines.text())]
            ),
        ],
    )
    low, high = (sum(part.seconds_range[i] for part in derived.parts) for i in (0, 1))
    console.out(f"expected: {duration(low)} to {duration(high)}, of {duration(derived.seconds)}")
    for part in derived.parts:
        low, high = part.seconds_range
        console.out(f"  {part.name}, {part.amount}: {duration(low)} to {duration(high)}")


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return (
        f"{value:,}" if isinstance(value, int) else "the target's" if value is None else str(value)
    )
