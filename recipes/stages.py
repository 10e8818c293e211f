"""Stages of a recipe: an ordinary recipe for each, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.core.errors import RecipeError, nearest
from specctl.recipes.load import build_recipe
from specctl.recipes.schema import Recipe, StagePart
from specctl.recipes.section import flatten

PREFIX = "stage:"


def stages_of(recipe: Recipe, where: str = "recipe") -> dict[str, Recipe]:
    """Name -> the recipe of that stage, every value checked; empty without stages.

    A later stage starts from the one before (drafter.init "stage:NAME") and keeps its draft
    vocabulary, unless it says otherwise."""
    found: dict[str, Recipe] = {}
    for name, part in recipe.stages.items():
        before = next(reversed(found), None)
        found[name] = _stage(recipe, name, part, before, where)
        for said in references(found[name]):
            _check_known(said, list(found)[:-1], f"{where}:stages.{name}")
    return found


def runs_of(recipe: Recipe) -> list[Recipe]:
    """What is run one after another: the stages, or the recipe itself."""
    return [*stages_of(recipe).values()] or [recipe]


def references(recipe: Recipe) -> list[str]:
    """The stages whose folders a stage's recipe names."""
    leaves = flatten(recipe.to_json()).values()
    return [v.removeprefix(PREFIX) for v in leaves if isinstance(v, str) and v.startswith(PREFIX)]


def resolved(recipe: Recipe, folders: Mapping[str, str]) -> Recipe:
    """The recipe with "stage:NAME" replaced by that stage's folder."""

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put(below) for key, below in value.items()}
        if isinstance(value, str) and value.startswith(PREFIX):
            return folders[value.removeprefix(PREFIX)]
        return value

    return build_recipe(put(recipe.to_json()), recipe.name).with_origin(recipe.origin)


def _stage(recipe: Recipe, name: str, part: StagePart, before: str | None, where: str) -> Recipe:
    tree, changes = recipe.to_json(), part.model_dump(mode="json")
    del tree["stages"]
    tree["name"] = f"{recipe.name}-{name}"
    if before is not None:
        tree["drafter"]["init"] = f"{PREFIX}{before}"
        tree["vocab"]["size"] = None
    _merge(tree, changes)
    origin = dict.fromkeys(flatten(changes), f"stage {name}")
    return build_recipe(tree, f"{where}:stages.{name}").with_origin({**recipe.origin, **origin})


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
