"""What `specctl recipes` prints of the recipes of `specctl pretrain`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.commands.recipe_commands import command_of, shown_value
from specctl.cli.commands.recipe_lists import first_sentence
from specctl.core.errors import one_of_two
from specctl.recipes.pretrained import PretrainingRecipe, pretraining_recipes

GROUP = "of specctl pretrain"


def found_by(family: str | None, search: str | None) -> list[PretrainingRecipe]:
    """Those with this word; they have no drafter, and so none of a family."""
    word = (search or "").lower()
    if family is not None:
        return []
    return [r for r in pretraining_recipes() if word in f"{GROUP} {r.name} {r.summary}".lower()]


def show_group(console: Console, recipes: Sequence[PretrainingRecipe]) -> None:
    """Their table in the list of recipes; nothing where there is none."""
    if not recipes:
        return
    rows = [[one.name, first_sentence(one.summary)] for one in recipes]
    console.table(("recipe", "what"), rows, title=f"{GROUP}:")
    console.out()


def group_json(recipes: Sequence[PretrainingRecipe]) -> list[dict[str, Any]]:
    """The same as objects."""
    return [{"name": one.name, "summary": one.summary, "group": GROUP} for one in recipes]


def show_one(console: Console, recipe: PretrainingRecipe, sets: Sequence[str]) -> None:
    """Explain one: what it makes, and every value with its remark; it has no defaults."""
    if sets:
        raise one_of_two(
            f"{recipe.name} is a recipe of specctl pretrain, which takes no --set",
            f"{recipe.name} --set {sets[0]}",
            f"specctl recipes cp {recipe.name} my-recipe.yaml   (and change that)",
        )
    console.prose(f"{recipe.name}: {recipe.summary}")
    console.out()
    notes = recipe.notes
    rows = [(field, shown_value(v), notes.get(field, "")) for field, v in recipe.values.items()]
    console.table(("field", "value", "remark"), rows)
    result = {
        "recipe": recipe.tree,
        "group": GROUP,
        "summary": recipe.summary,
        "notes": notes,
        "source": f"{recipe.name}.yaml",
        "text": recipe.text,
    }
    console.done(result, next=[command_line(*command_of(recipe.text))])
