"""The names and options of the drafter families, read from their source: no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from specctl.core.errors import IncompatibleError, RecipeError, nearest, unknown
from specctl.core.plugins import declared
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl.recipes.stages import stages_of

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe


FEW_BITS = ("int8", "int4", "gguf")  # dtypes whose stored weights are not kept


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """A family by its source: name, the fields of its options, whether it trains, whether it reads
    the target's weights as they are stored, whether it runs layers of the target."""

    name: str
    options: tuple[str, ...]
    trainable: bool
    reads_stored: bool = False
    borrows_layers: bool = False


@cache
def family_infos() -> dict[str, FamilyInfo]:
    """Every family by name, in alphabetical order."""
    found = declared("specctl.drafters", "FAMILY").values()
    return {
        f.name: FamilyInfo(
            f.name,
            tuple(f.fields()),
            bool(f.values.get("trainable", False)),
            bool(f.values.get("reads_stored", False)),
            bool(f.values.get("borrows_layers", False)),
        )
        for f in found
    }


def check_stored(dtype: str, names: Iterable[str]) -> None:
    """Refuse drafters that read the target's stored weights beside a dtype of few bits, of which
    nothing else is kept; known by their names, before anything is loaded."""
    if dtype not in FEW_BITS:
        return
    infos = family_infos()
    readers = sorted(name for name, info in infos.items() if info.reads_stored)
    for name in names:
        if _family_of(name) in readers:
            raise IncompatibleError(
                f"{name} drafts with the target's stored weights, which --dtype {dtype} does not "
                "keep",
                where="--dtype",
                found=f"--dtype {dtype} and {name}",
                expected=f"the weights as stored, which {', '.join(readers)} alone needs",
                do=f"--dtype {'float32' if dtype == 'gguf' else 'auto'}, or another drafter beside "
                f"{dtype}: --draft prompt-lookup",
            )


def _family_of(name: str) -> str:
    """The family behind the name of a drafter without training; any other name is returned."""
    if name in family_infos() or name not in recipe_names():
        return name
    return load_recipe(name).drafter.family


def check_options(recipe: Recipe, where: str) -> FamilyInfo:
    """Refuse an unknown family or an option that the family does not have, in any stage."""
    for name, stage in stages_of(recipe, where).items():
        check_options(stage, f"{where}:stages.{name}")
    known = family_infos()
    name = recipe.drafter.family
    if name not in known:
        raise unknown(
            "drafter family", name, known, f"{where}:drafter.family", "specctl recipes ls --all"
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
