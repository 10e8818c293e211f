"""What pydantic finds wrong in a recipe, as errors with field, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specctl.core.errors import RecipeError, did_you_mean, nearest, one_of
from specctl.recipes.schema import Recipe, section_at
from specctl.recipes.section import Section


def explain(problem: Mapping[str, Any], where: str, sets: Sequence[str] = ()) -> RecipeError:
    """One problem found by pydantic as an error with field, value and remedy."""
    path = tuple(part for part in problem["loc"] if not _is_branch_label(part))
    field = ".".join(str(part) for part in path)
    if any(text.partition("=")[0].strip() == field for text in sets):
        where = "--set"
    owner = section_at(path) if path else Recipe
    if problem["type"] == "extra_forbidden":
        known = list((owner or Recipe).model_fields)
        close = nearest(str(path[-1]), known)
        return RecipeError(
            f"unknown key {path[-1]!r}",
            where=f"{where}:{field}",
            found=str(path[-1]),
            expected="one of " + ", ".join(known),
            do=f"write {close.split(', ')[0]} instead of {path[-1]}  (nearest: {close})",
        )
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        return _unknown_choice(problem, path, f"{where}:{field}", _remedy(field, owner, path))
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error" and isinstance(problem.get("input"), Mapping):
        otherwise = _remedy(field, owner, path)
        return _disagreement(message, problem["input"], f"{where}:{field}", otherwise)
    return RecipeError(
        f"{field or 'recipe'} is not valid",
        where=f"{where}:{field}",
        found=repr(problem.get("input"))[:120],
        expected=message[0].lower() + message[1:],
        do=_remedy(field, owner, path),
    )


def _unknown_choice(
    problem: Mapping[str, Any], path: tuple[Any, ...], where: str, otherwise: str
) -> RecipeError:
    """A word that is none of those which a field may be."""
    known = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
    return RecipeError(
        f"{'.'.join(map(str, path))} is not valid",
        where=where,
        found=repr(problem["input"])[:120],
        expected=one_of(known, f"specctl recipes schema --field {path[0]}"),
        do=did_you_mean(problem["input"], known, otherwise),
    )


def _disagreement(
    message: str, given: Mapping[str, Any], where: str, otherwise: str
) -> RecipeError:
    """Values of a section that do not go together. The message of a section's own check is
    "what is wrong; what to do", and names the fields that it is about."""
    rule, _, remedy = message.partition("; ")
    about = {key: given[key] for key in given if re.search(rf"\b{key}\b", message)}
    return RecipeError(
        rule,
        where=where,
        found=", ".join(f"{key}: {value}" for key, value in about.items())[:200] or "the defaults",
        expected="values that go together",
        do=remedy or otherwise,
    )


def _is_branch_label(part: Any) -> bool:
    """True for the labels that pydantic adds for the branch of a union, e.g. constrained-int."""
    return isinstance(part, str) and (
        part in ("int", "float", "str", "none") or "[" in part or part.startswith("constrained")
    )


def _remedy(field: str, owner: type[Section] | None, path: tuple[Any, ...]) -> str:
    info = owner.model_fields.get(str(path[-1])) if owner and path else None
    if info is None or info.is_required():
        return "correct the value; `specctl recipes show eagle3` prints a valid recipe"
    default = info.get_default(call_default_factory=True)
    if isinstance(default, Section):
        return f"correct section {field}; `specctl recipes show eagle3` prints a valid recipe"
    shown = (
        "null" if default is None else str(default).lower() if default in (True, False) else default
    )
    return f"--set {field}={shown} restores the default"
