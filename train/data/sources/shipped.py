"""What a recipe that comes with specctl may not decide alone: whose words a drafter learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specctl.core.errors import RecipeError
from specctl.recipes.files import base_names, recipe_names
from specctl.recipes.schema import DataPart
from specctl.runtime.target.target import Target
from specctl.train.data.records.records import Sample
from specctl.train.data.sources.self_source import refusal, refusal_of
from specctl.train.data.sources.sources import CORPUS, SELF, is_corpus


def check_corpus(name: str, data: DataPart, origin: Mapping[str, str], target: Target) -> None:
    """RecipeError where the recipe's own setting, and not the user's, would make the drafter of a
    chat model learn from the Python files of this machine. `origin`: what has set each field."""
    is_own = is_shipped(origin["data.source"])
    if not (is_own and target.is_chat and is_corpus(data.source)):
        return
    can_write = refusal(data) is None and refusal_of(target) is None
    by_target = f"--data {SELF}, questions that the target writes itself; " if can_write else ""
    raise RecipeError(
        f"{name} would train the drafter of a chat model on Python files",
        where="data.source",
        found=f"{CORPUS}, set by {origin['data.source']}: files of this machine, for "
        "demonstrations",
        expected="questions as the users of this model ask them",
        do=f"--data prompts.jsonl, a file of messages or prompts; {by_target}--data {CORPUS} "
        "trains on the files all the same",
    )


def is_shipped(said_by: str) -> bool:
    """Whether the origin of a field is a recipe that comes with specctl, and nobody else."""
    kind, _, name = said_by.partition(" ")
    return kind in ("base", "stage") or (
        kind == "recipe" and name in (*recipe_names(), *base_names())
    )


def check_own_answers(
    name: str, data: DataPart, origin: Mapping[str, str], samples: Sequence[Sample]
) -> None:
    """RecipeError where the recipe's own setting, and not the user's, would make the drafter learn
    answers that the target may not have written."""
    said_by = origin["data.regenerate"]
    is_explicit = not is_shipped(said_by) or said_by == origin["data.source"]
    if data.regenerate or is_explicit or data.on_policy == 1.0:
        return
    foreign = next((s for s in samples if not s.ids and _has_answer(s)), None)
    if foreign is not None:
        raise RecipeError(
            f"{name} would learn the answers in the data, which the target may not have written",
            where=foreign.where,
            found=f"data.regenerate: false, set by {said_by}, and conversations with answers",
            expected="answers of the target, or a setting of yours to learn those of the data",
            do="--set data.regenerate=true lets the target write them; "
            "--set data.regenerate=false learns them as they are",
        )


def _has_answer(sample: Sample) -> bool:
    spoken = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
    return bool(set(spoken) - {*sample.given, *sample.unanswered})
