"""What `recipe` and `settings` arguments stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.api.arguments.families import check_options, family_infos
from specctl.api.arguments.targets import TargetLike, load_target
from specctl.core.errors import RecipeError, did_you_mean
from specctl.recipes.load import IN_CALL, load_recipe, recipe_in_memory, with_fields
from specctl.recipes.schema import Recipe
from specctl.recipes.section import Section, flatten

RecipeLike = str | Path | Mapping[str, Any] | Recipe
INDEPENDENT = ("small-lm", "sorted")  # families of models that draft without the target
SAID_BY = IN_CALL  # the origin of what a call sets


def recipe_of(recipe: RecipeLike, target: TargetLike, settings: Mapping[str, Any]) -> Recipe:
    """The recipe for that target with these settings, checked."""
    if isinstance(recipe, Mapping):
        recipe = recipe_in_memory(recipe, "recipe")
    base = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    fields = _target_fields(target)
    for name, value in settings.items():
        fields |= _fields(base.drafter.family, name, value)
    if not fields:
        return base
    made = with_fields(base, fields, SAID_BY)
    check_options(made, made.name)
    return made


def set_words(tree: Mapping[str, Any], origin: Mapping[str, str]) -> list[str]:
    """--set for every value of a tree that a call has set, by its origin."""
    values = flatten(tree)
    named = [field for field, said_by in origin.items() if said_by == SAID_BY]
    return [word for k in named for word in ("--set", f"{k}={json.dumps(values[k])}")]


def run_folder(target: str, recipe: str) -> Path:
    """Where a run is written unless it is said, by the names of both: runs/TARGET-RECIPE."""
    return Path("runs") / f"{folder_name(target)}-{recipe}"


def folder_name(target: str) -> str:
    """A target's name as that of a folder: steps of a path are joined, and none is hidden."""
    steps = [step for step in target.split("/") if step not in ("", ".", "..")]
    named = "--".join(steps).lstrip(".")
    return named or Path(target).resolve().name or "target"


def refuse_dependent(name: str, family: str) -> None:
    """What distill trains, by the recipe of that name, needs nothing of the target while it
    runs."""
    if family not in INDEPENDENT:
        raise RecipeError(
            "distill trains independent small models only",
            where=f"{name}:drafter.family",
            found=family,
            expected=" or ".join(INDEPENDENT),
            do=f"specctl train-draft --recipe {name}   (trains {family})",
        )


def _target_fields(target: TargetLike) -> dict[str, Any]:
    """The fields of the section `target`; a target in memory decides all of them."""
    if target is None:
        return {}
    if isinstance(target, (str, Path)):
        return {"target.name": str(target)}
    model = load_target(target)
    return {
        "target.name": model.name,
        "target.revision": model.revision,
        "target.dtype": model.dtype_name,
        "target.inflate": model.inflated,
        "target.adapters": [one.text() for one in model.adapters],
    }


def _fields(family: str, name: str, value: Any) -> dict[str, Any]:
    """The dotted fields that one keyword sets, in the recipe of a drafter of that family."""
    sections = {k: type(v) for k, v in Recipe() if isinstance(v, Section) and k != "scaling"}
    if name in sections and isinstance(value, Mapping):
        return {f"{name}.{key}": below for key, below in flatten(value).items()}
    if name == "data":
        several = isinstance(value, (list, tuple))
        return {"data.source": [str(one) for one in value] if several else str(value)}
    if "." in name or name in (set(Recipe.model_fields) - {*sections, "scaling"}):
        return {name: value}
    found = [f"{key}.{name}" for key, kind in sections.items() if name in kind.model_fields]
    info = family_infos().get(family)
    if not found and info is not None and name in info.options:
        found = [f"drafter.options.{name}"]
    if len(found) == 1:
        return {found[0]: value}
    known = [key for kind in sections.values() for key in kind.model_fields]
    known += [] if info is None else info.options
    section, _, key = (found[0] if found else "train.steps").rpartition(".")
    raise RecipeError(
        f"{name!r} stands in several sections" if found else f"unknown setting {name!r}",
        where="specctl.train",
        found=name,
        expected="one of " + ", ".join(found)
        if found
        else "a key of the recipe, or of one of its sections: " + ", ".join(sections),
        do=f"{section}={{{key!r}: ...}}" if found else did_you_mean(name, known, "see recipes.md"),
    )
