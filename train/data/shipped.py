"""What a recipe that comes with specctl may not decide alone: whose words a drafter learns."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.core.errors import RecipeError
from specctl.recipes.files import base_names, recipe_names
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.data.records import Sample
from specctl.train.data.sources import CORPUS, SELF, is_corpus
from specctl.train.data.written.self_source import refusal, refusal_of


def check_corpus(recipe: Recipe, target: Target) -> None:
    """RecipeError where a recipe's own setting, and not the user's, would make the drafter of a
    chat model learn from the Python files of this machine."""
    is_own = is_shipped(recipe, "data.source")
    if not (is_own and target.is_chat and is_corpus(recipe.data.source)):
        return
    can_write = refusal(recipe.data) is None and refusal_of(target) is None
    by_target = f"--data {SELF}, questions that the target writes itself; " if can_write else ""
    raise RecipeError(
        f"{recipe.name} would train the drafter of a chat model on Python files",
        where="data.source",
        found=f"{CORPUS}, set by {recipe.origin['data.source']}: files of this machine, for "
        "demonstrations",
        expected="questions as the users of this model ask them",
        do=f"--data prompts.jsonl, a file of messages or prompts; {by_target}--data {CORPUS} "
        "trains on the files all the same",
    )


def is_shipped(recipe: Recipe, field: str) -> bool:
    """Whether a recipe that comes with specctl, and nobody else, has set a field."""
    kind, _, name = recipe.origin[field].partition(" ")
    return kind in ("base", "stage") or (
        kind == "recipe" and name in (*recipe_names(), *base_names())
    )


def check_own_answers(recipe: Recipe, samples: Sequence[Sample]) -> None:
    """RecipeError where a recipe's own setting, and not the user's, would make the drafter learn
    answers that the target may not have written."""
    data, origin = recipe.data, recipe.origin
    said_by = origin["data.regenerate"]
    is_explicit = not is_shipped(recipe, "data.regenerate") or said_by == origin["data.source"]
    if data.regenerate or is_explicit or data.on_policy == 1.0:
        return
    foreign = next((s for s in samples if not s.ids and _has_answer(s)), None)
    if foreign is not None:
        raise RecipeError(
            f"{recipe.name} would learn the answers in the data, which the target may not have "
            "written",
            where=foreign.where,
            found=f"data.regenerate: false, set by {said_by}, and conversations with answers",
            expected="answers of the target, or a setting of yours to learn those of the data",
            do="--set data.regenerate=true lets the target write them; "
            "--set data.regenerate=false learns them as they are",
        )


def _has_answer(sample: Sample) -> bool:
    spoken = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
    return bool(set(spoken) - {*sample.given, *sample.unanswered})
