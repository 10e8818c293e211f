"""The source `self`: for which recipes and targets the target can write the questions itself.

What the recipe says is refused before anything is loaded, what the target lacks before it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.core.errors import FileError, RecipeError
from specctl.recipes.schema import DataPart
from specctl.train.data.sources.sources import SELF, names_of

if TYPE_CHECKING:
    from specctl.runtime.target.target import Target

FILE = "self-prompts.jsonl"  # in OUT/data: the questions that were written
AS_RECORDS = ("auto", "jsonl")  # data.format that reads this file
BY_FILE = "give the questions as a file: --data prompts.jsonl"


def uses_self(source: str | Sequence[str]) -> bool:
    """Whether the target writes questions of this data."""
    return SELF in names_of(source)


def is_question(where: str) -> bool:
    """Whether the record at a place, FILE:LINE, is a question that a target wrote."""
    return Path(where).name.startswith(f"{FILE}:")


def check_self(data: DataPart, target: Target | None = None) -> None:
    """RecipeError where the data have the source `self` and nobody is here to write it; of the
    target only where it is known."""
    if not uses_self(data.source):
        return
    error = refusal(data) if target is None else refusal(data) or refusal_of(target)
    if error is not None:
        raise error


def refusal(data: DataPart) -> RecipeError | None:
    """What in a recipe's data rules out that the target writes the questions."""
    if not data.regenerate:
        return _refused(
            "the target writes questions, and nobody would answer them",
            f"data.source: {SELF}, data.regenerate: false",
            "data.regenerate: true",
            "--set data.regenerate=true",
        )
    elsewhere = None if data.endpoint is None else f"data.endpoint: {data.endpoint}"
    if data.target_source != "inprocess":
        elsewhere = f"data.target_source: {data.target_source}"
    if elsewhere is not None:
        return _refused(
            "the target writes questions in this process, and its layers are elsewhere",
            elsewhere,
            "a target that is loaded here",
            f"leave {elsewhere.partition(':')[0]} out, or {BY_FILE}",
        )
    if data.format not in AS_RECORDS:
        return _refused(
            "what the target writes is read as records in JSON",
            f"data.format: {data.format}",
            "data.format: auto",
            "leave data.format out; the format of a file follows from its name",
        )
    return None


def refusal_of(target: Target) -> RecipeError | None:
    """What a target lacks to write questions."""
    if target.why_text is not None:
        return _refused(
            f"target {target.name} is no chat model, so it has no questions to write",
            target.why_text,
            "a model with a chat template that it was trained on",
            "--data texts.txt, a file that it goes on from, or --data corpus",
        )
    if not target.can_run:
        return _refused(
            f"target {target.name} can be read here, but not run, so it writes no questions",
            str(getattr(target.lm, "reason", "")),
            "a target that can be decoded with",
            BY_FILE,
        )
    return None


def _refused(what: str, found: str, expected: str, do: str) -> RecipeError:
    return RecipeError(what, where="data.source", found=found, expected=expected, do=do)


def others_of(data: DataPart) -> DataPart | None:
    """The data without the source `self`; None where nothing is left."""
    names = tuple(name for name in names_of(data.source) if name != SELF)
    return data.model_copy(update={"source": names}) if names else None


def with_file(data: DataPart, folder: Path) -> DataPart:
    """The data with the file of the written questions in the place of `self`."""
    if not uses_self(data.source):
        return data
    file = folder / FILE
    if not file.is_file():
        raise FileError(
            "the questions that the target wrote are gone",
            where="data.source",
            found=f"no file {file}",
            expected=f"the file that this run's source {SELF} stands for",
            do="restore the file, or choose another --out to have them written anew",
        )
    names = tuple(str(file) if name == SELF else name for name in names_of(data.source))
    return data.model_copy(update={"source": names})
