"""Stages of a recipe: an ordinary recipe for each, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.core.errors import RecipeError, nearest
from specctl.recipes.load import build_recipe
from specctl.recipes.schema import Recipe
from specctl.recipes.section import flatten

PREFIX = "stage:"


def stages_of(recipe: Recipe, where: str = "recipe") -> dict[str, Recipe]:
    """Name -> the recipe of that stage, every value checked; empty without stages.

    A later stage starts from the one before (drafter.init "stage:NAME") and keeps its draft
    vocabulary, unless it says otherwise."""
    found: dict[str, Recipe] = {}
    for name, part in recipe.stages.items():
        tree, changes = recipe.to_json(), part.model_dump(mode="json")
        tree["name"] = f"{recipe.name}-{name}"
        _change(tree, changes, next(reversed(found), None))
        origin = {**recipe.origin, **dict.fromkeys(flatten(changes), f"stage {name}")}
        found[name] = build_recipe(tree, f"{where}:stages.{name}").with_origin(origin)
        for said in references(tree):
            _check_known(said, list(found)[:-1], f"{where}:stages.{name}")
    return found


def runs_of(recipe: Recipe) -> list[Recipe]:
    """What is run one after another: the stages, or the recipe itself."""
    return [*stages_of(recipe).values()] or [recipe]


def references(tree: Mapping[str, Any]) -> list[str]:
    """The stages whose folders the values of a stage's recipe name."""
    leaves = flatten(tree).values()
    return [v.removeprefix(PREFIX) for v in leaves if isinstance(v, str) and v.startswith(PREFIX)]


def resolved(tree: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, Any]:
    """The values of a recipe with "stage:NAME" replaced by that stage's folder."""

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put(below) for key, below in value.items()}
        if isinstance(value, str) and value.startswith(PREFIX):
            return folders[value.removeprefix(PREFIX)]
        return value

    return {key: put(value) for key, value in tree.items()}


def _change(tree: dict[str, Any], changes: Mapping[str, Any], before: str | None) -> None:
    """Make a recipe's values those of a stage behind the stage `before`."""
    del tree["stages"]
    if before is not None:
        tree["drafter"]["init"] = f"{PREFIX}{before}"
        tree["vocab"]["size"] = None
    _merge(tree, changes)


def _merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _check_known(name: str, earlier: list[str], where: str) -> None:
    if name not in earlier:
        raise RecipeError(
            "a stage asks for a stage that has not run before it",
            where=where,
            found=f"{PREFIX}{name}",
            expected="one of " + ", ".join(earlier) if earlier else "no reference: it is the first",
            do=f"write {PREFIX}{nearest(name, earlier, 1)}" if earlier else "remove the reference",
        )
