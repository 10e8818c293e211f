"""Read recipes: defaults < parents < file < flags < --set, every value with its origin, errors by
field.

What pydantic finds wrong becomes an error with field, value and remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from specctl.core.errors import RecipeError, did_you_mean, one_of, write_instead
from specctl.recipes.files import parse_yaml, recipe_names
from specctl.recipes.foreign_keys import right_field
from specctl.recipes.lineage import BASED_ON, lineage, lineage_of, overlay
from specctl.recipes.schema import Recipe, section_at
from specctl.recipes.section import Section, flatten

EMBEDDED = "tiny"  # the target that comes with specctl
SET, LINE, IN_CALL = "--set", "command line", "Python"  # what says a value that no file says
# What a recipe says of the text of its own source. It holds for no other: what a demonstration
# learns of Python files would make a user's chats learn their prompts and foreign answers.
OF_SOURCE = ("data.text_tokens", "data.train_on_prompt", "data.format", "data.split")


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """One line of `specctl recipes ls`. `is_joint`: the target learns, whatever its drafter is."""

    name: str
    family: str
    target: str
    summary: str
    paper: str
    is_joint: bool = False


def load_recipe(
    name_or_path: str | Path,
    sets: Sequence[str] = (),
    target: str | None = None,
    flags: Mapping[str, Any] | None = None,
    named: Mapping[str, str] | None = None,
) -> Recipe:
    """A checked recipe. `flags` are dotted fields set by options of the command line, such as
    {"data.source": "chats.jsonl"}, and `named` says by which, {"data.source": "--data"}; `target`
    is the flag target.name. --set wins over all."""
    layers = lineage(name_or_path)
    tree, layer_of = overlay(layers)
    where, name = layers[-1].source.where, layers[-1].name
    tree.setdefault("name", name)
    origin = {"name": f"recipe {name}"}
    origin |= {field: f"recipe {layer.name}" for field, layer in layer_of.items()}
    files = {field: layer.source.where for field, layer in layer_of.items()}
    given = dict(flags or {})
    if target is not None:
        given["target.name"] = target
    set_fields = [parse_set(text)[0] for text in sets]
    ranks = {field: layers.index(layer) for field, layer in layer_of.items()}
    ranks |= dict.fromkeys([*given, *set_fields], len(layers))
    for field in foreign_to_source(ranks):
        del tree["data"][field.partition(".")[2]]
        origin.pop(field), files.pop(field)
    for field, value in given.items():
        _place(tree, field, value, where)
        origin[field] = files[field] = (named or {}).get(field, LINE)
    for text in sets:
        field, value = parse_set(text)
        value = _as_text(field, value, text.partition("=")[2].strip())
        _place(tree, field, value, f"--set {text}")
        origin.update(dict.fromkeys(_leaves(field, value), "--set"))
    return build_recipe(tree, where, sets, files).with_origin(origin)


def recipe_in_memory(tree: Mapping[str, Any], where: str) -> Recipe:
    """A checked recipe of plain values, which may be based on another."""
    return build_recipe(overlay(lineage_of(tree, where))[0], where)


def with_fields(recipe: Recipe, fields: Mapping[str, Any], said_by: str) -> Recipe:
    """The recipe with dotted fields changed, and checked again; `said_by` is their origin."""
    tree, origin = recipe.to_json(), recipe.origin
    is_shipped = {f: origin[f] == "base" or origin[f].startswith("recipe ") for f in OF_SOURCE}
    ranks = {field: 0 if is_shipped[field] else 1 for field in OF_SOURCE}
    ranks |= dict.fromkeys(fields, 1)
    for field in foreign_to_source(ranks):
        del tree["data"][field.partition(".")[2]]
        del origin[field]
    for field, value in fields.items():
        _place(tree, field, value, said_by)
        origin |= dict.fromkeys(_leaves(field, value), said_by)
    return build_recipe(tree, said_by).with_origin(origin)


def foreign_to_source(ranks: Mapping[str, int]) -> list[str]:
    """The fields that were said of another source than the one that is read. `ranks`: of each field
    how late it was said."""
    source = ranks.get("data.source", 0)
    return [field for field in OF_SOURCE if ranks.get(field, source) < source]


def build_recipe(
    tree: Mapping[str, Any],
    where: str,
    sets: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> Recipe:
    """Check a tree of plain values; the first problem is raised by file and field. `files` says of
    dotted fields which file they are from, `where` of all others."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        found = sorted(error.errors(), key=lambda p: p["type"] != "extra_forbidden")
        problems = [explain(dict(problem), where, sets, files) for problem in found]
        first = problems[0]
        if len(problems) > 1:
            fields = {p.where.rsplit(":", 1)[-1]: p.what for p in problems[1:]}
            fields.pop(first.where.rsplit(":", 1)[-1], None)  # a union tells every branch's problem
            also = "; ".join(f"{field}: {what}" for field, what in fields.items())
            first.found += f" (also wrong: {also})" if also else ""
        raise first from error


def parse_set(text: str) -> tuple[str, Any]:
    """`train.steps=40` -> ("train.steps", 40); the value is read as YAML."""
    field, equals, value = text.partition("=")
    field = field.strip()
    if not equals or not field or any(not part for part in field.split(".")):
        raise RecipeError(
            f"--set {text} is not of the form section.key=value",
            where="--set",
            found=text,
            expected="a dotted field, an equals sign, a YAML value",
            do="--set train.steps=400",
        )
    return field, parse_yaml(value, f"--set {field}")


def _as_text(field: str, value: Any, text: str) -> Any:
    """The value of a --set, or its text as it was written where the field is a text: no, 2024 and
    1e5 are others to YAML."""
    if value is None or isinstance(value, (str, list, dict)):
        return value
    path = tuple(field.split("."))
    owner = section_at(path)
    info = owner.model_fields.get(path[-1]) if owner is not None else None
    kinds = _kinds(info.annotation) if info is not None else set()
    is_number = isinstance(value, (bool, int, float)) and not kinds.isdisjoint({bool, int, float})
    return text if str in kinds and not is_number else value


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that an annotation admits; a Literal admits those of its words."""
    if get_origin(annotation) is Literal:
        return {type(word) for word in get_args(annotation)}
    inner = get_args(annotation)
    return {kind for one in inner for kind in _kinds(one)} if inner else {annotation}


def list_recipes() -> list[RecipeInfo]:
    """Every recipe that comes with specctl, by name."""
    infos = []
    for name in recipe_names():
        recipe = load_recipe(name)
        part = (recipe.drafter.family, recipe.target.name, recipe.summary, recipe.paper)
        infos.append(RecipeInfo(name, *part, recipe.train.joint is not None))
    return infos


def _place(tree: dict[str, Any], field: str, value: Any, where: str) -> None:
    *parents, last = field.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if below is None:
            below = tree[parent] = {}
        if not isinstance(below, dict):
            raise RecipeError(
                f"{parent} is a value, not a section",
                where=where,
                found=f"{parent}={below!r}",
                expected="a section such as train, and then a key of it",
                do="--set train.steps=400",
            )
        tree_below: dict[str, Any] = below
        tree = tree_below
    tree[last] = value


def _leaves(field: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [f"{field}.{leaf}" for leaf in flatten(value)]
    return [field]


def explain(
    problem: Mapping[str, Any],
    where: str,
    sets: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> RecipeError:
    """One problem found by pydantic as an error with field, value and remedy."""
    path = tuple(part for part in problem["loc"] if not _is_branch_label(part))
    field = ".".join(str(part) for part in path)
    where = (files or {}).get(field, where)
    if any(text.partition("=")[0].strip() == field for text in sets):
        where = SET
    owner = section_at(path) if path else Recipe
    remedy = _remedy(field, owner, path, where)
    if problem["type"] == "extra_forbidden":
        right = right_field(field)
        known = list((owner or Recipe).model_fields)
        known += [BASED_ON] if len(path) == 1 and where != SET else []
        return RecipeError(
            f"unknown key {path[-1]!r}",
            where=f"{where}:{field}",
            found=str(path[-1]),
            expected="one of " + ", ".join(known),
            do=f"write {right} instead of {field}"
            if right is not None
            else write_instead(str(path[-1]), known),
        )
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        return _unknown_choice(problem, path, f"{where}:{field}", remedy)
    if problem["type"] == "model_type" and not isinstance(problem["input"], Mapping):
        return _no_section(field, problem["input"], f"{where}:{field}")
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error" and isinstance(problem.get("input"), Mapping):
        return _disagreement(message, problem["input"], f"{where}:{field}", remedy)
    return RecipeError(
        f"{field or 'recipe'} is not valid",
        where=f"{where}:{field}",
        found=repr(problem.get("input"))[:120],
        expected=message[0].lower() + message[1:],
        do=remedy,
    )


def _no_section(field: str, value: object, where: str) -> RecipeError:
    """A value where a section stands; its first key that a word may be is what was meant."""
    owner = section_at((*field.split("."), ""))
    keys = [f"{field}.{key}" for key in (owner or Recipe).model_fields]
    return RecipeError(
        f"{field} is a section, not a value",
        where=where,
        found=repr(value)[:120],
        expected="keys of it, such as " + ", ".join(keys[:3]),
        do=f"{SET} {keys[0]}={value}" if where.startswith(SET) else f"write {keys[0]}: {value}",
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


def _remedy(field: str, owner: type[Section] | None, path: tuple[Any, ...], where: str) -> str:
    """How the value is set right in the place that said it: a flag, a file, or a call."""
    info = owner.model_fields.get(str(path[-1])) if owner and path else None
    if info is None or info.is_required():
        return "correct the value; `specctl recipes show eagle3` prints a valid recipe"
    default = info.get_default(call_default_factory=True)
    if isinstance(default, Section):
        return f"correct section {field}; `specctl recipes show eagle3` prints a valid recipe"
    shown = (
        "null" if default is None else str(default).lower() if default in (True, False) else default
    )
    if where == SET:
        return f"{SET} {field}={shown} restores the default"
    if where.startswith("--"):
        return f"give {where} another value, or leave it out (the default is {shown})"
    key, at = field.rpartition(".")[2], "" if where in (LINE, IN_CALL) else f" in {where}"
    return f"write {key}: {shown}{at} (the default), or leave {key} out"
