"""The names and options of the drafter families, read from their source: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from specctl.core.errors import RecipeError, nearest, unknown
from specctl.core.plugins import declared
from specctl.recipes.stages import stages_of

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """A family by its source: name, the fields of its options, whether it trains."""

    name: str
    options: tuple[str, ...]
    trainable: bool


@cache
def family_infos() -> dict[str, FamilyInfo]:
    """Every family by name, in alphabetical order."""
    found = declared("specctl.drafters", "FAMILY").values()
    return {f.name: FamilyInfo(f.name, tuple(f.fields()), f.values["trainable"]) for f in found}


def check_options(recipe: Recipe, where: str) -> FamilyInfo:
    """Refuse an unknown family or an option that the family does not have, in any stage."""
    for name, stage in stages_of(recipe, where).items():
        check_options(stage, f"{where}:stages.{name}")
    known = family_infos()
    name = recipe.drafter.family
    if name not in known:
        raise unknown(
            "drafter family", name, known, f"{where}:drafter.family", "specctl recipes ls"
        )
    info = known[name]
    for option in recipe.drafter.options:
        if option not in info.options:
            raise RecipeError(
                f"family {name} has no option {option!r}",
                where=f"{where}:drafter.options.{option}",
                found=option,
                expected="one of " + (", ".join(info.options) or "none"),
                do=f"write {nearest(option, info.options, 1) or 'no options'}",
            )
    return info
