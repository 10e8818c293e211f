"""`--time`: the recipe of a training command, derived for its target, data and this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.api.derive import (
    DERIVED,
    Choices,
    chosen_fields,
    derive_recipe,
    is_foreign,
    keep,
    kept,
    longer,
    origin_digest,
    seconds_of,
)
from specctl.api.derive import RECORD as CHOICES
from specctl.api.preflight import check_run
from specctl.cli.app.console import Console
from specctl.cli.app.launch import is_launched
from specctl.cli.app.progress import duration
from specctl.core.errors import FileError, RecipeError
from specctl.recipes.load import with_fields
from specctl.recipes.section import flatten
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
    """A recipe of a run in `out`, and what decides whether it is derived: its name as it was given,
    the value of --time, the processes that share a batch, whether a run may go on with more data,
    and what plans the parts that are done before the run in the same time."""

    recipe: Recipe
    out: Path
    given: str
    time: str | None
    processes: int = 1
    allows_more: bool = False
    before: Callable[[], Sequence[Part]] = tuple

    def of_run(self, console: Console) -> Recipe:
        """The recipe of the run: derived before, derived now and kept there, or as it is."""
        found = self._kept(console)
        if found is not None or is_launched():
            return found or self.recipe
        derived = self.now(console)
        if derived is None:
            return self.recipe
        keep(derived, self.out, self._digest())
        return derived.recipe

    def of_plan(self, console: Console) -> tuple[Recipe, Pace | None]:
        """The same where nothing is to be written, with the pace that was measured for it."""
        found = self._kept(console)
        if found is not None:
            return found, None
        derived = self.now(console)
        return (self.recipe, None) if derived is None else (derived.recipe, derived.pace)

    def now(self, console: Console) -> Derived | None:
        """The recipe derived and shown; None where that is not wanted."""
        out, more = self.out, self._longer()
        if more is None and not self._is_wanted():
            return None
        recipe = self.recipe if more is None else self._with(more)
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

    def _kept(self, console: Console) -> Recipe | None:
        out = self.out
        if self._longer() is not None:
            return None
        seconds = None if self.time is None else seconds_of(self.time)
        found = kept(out, seconds, self._digest)
        if found is not None:
            console.say(f"recipe: as it was derived for the run in {out}")
            return self._with(found)
        if (out / CHOICES).exists():
            other = "another target, method or time, or of other data"
            console.say(f"recipe: {out / CHOICES} is of {other}: not used")
        return None

    def _with(self, choices: Choices) -> Recipe:
        """The recipe with choices that were kept."""
        recipe = self.recipe
        fields = chosen_fields(choices, recipe.origin, flatten(recipe.to_json()))
        return with_fields(recipe, fields, DERIVED)

    def _digest(self) -> str:
        """Of what choices are derived from."""
        recipe = self.recipe
        return origin_digest(recipe.name, recipe.target, recipe.drafter, recipe.data)

    def _longer(self) -> Choices | None:
        """The sizes of the run, where it is to go on for a longer time."""
        if not self.allows_more or self.time is None:
            return None
        return longer(self.out, seconds_of(self.time))

    def _is_wanted(self) -> bool:
        recipe, out = self.recipe, self.out
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
        family = recipe.drafter.family
        is_elses = is_foreign(recipe.target, family, self.given, recipe.origin)
        return not begun and is_elses and self._is_derivable()

    def _is_derivable(self) -> bool:
        """Whether time decides the recipe's numbers, and nothing else."""
        from specctl.train.planning.derivable import check_derivable

        try:
            check_derivable(self.recipe)
        except RecipeError:
            return False
        return True


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
