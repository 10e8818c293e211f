"""Read recipes: defaults < file < flags < --set, every value with its origin, errors by field.

What pydantic finds wrong becomes an error with field, value and remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specctl.core.errors import FileError, RecipeError, did_you_mean, nearest, one_of
from specctl.recipes.schema import Recipe, section_at
from specctl.recipes.section import Section, flatten

NOT_RECIPES = ("sources", "targets", "tiny-target")
EMBEDDED = "tiny"  # the target that comes with specctl
EXPECTED = "a YAML file, or a name of `specctl recipes ls`"


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """One line of `specctl recipes ls`."""

    name: str
    family: str
    target: str
    summary: str
    paper: str


class RecipeYaml(yaml.SafeLoader):
    """YAML that reads 1e-3 as a number and refuses a key written twice."""


RecipeYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    # PyYAML follows YAML 1.1, where an exponent needs a dot and a sign.
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _mapping_once(loader: RecipeYaml, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is written twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


RecipeYaml.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_once)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; a syntax error names the file and the line."""
    try:
        return yaml.load(text, Loader=RecipeYaml)
    except RecursionError as error:
        raise RecipeError(
            "this YAML is nested too deep",
            where=where,
            found="lists or mappings in each other without end",
            expected="sections and their values",
            do="`specctl recipes show eagle3` prints a valid recipe",
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise RecipeError(
            "this is not valid YAML",
            where=place,
            found=str(getattr(error, "problem", error) or error),
            expected="YAML with each key once, indented by spaces",
            do="correct that line; `specctl recipes show eagle3` prints a valid recipe",
        ) from error


def recipe_names() -> list[str]:
    """The recipes that come with specctl."""
    files = resources.files("specctl.recipes").iterdir()
    names = [f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")]
    return sorted(set(names) - set(NOT_RECIPES))


def read_source(name_or_path: str) -> tuple[str, str]:
    """The text of a recipe and the name by which errors call it."""
    path = Path(name_or_path).expanduser()
    if path.is_dir() and (path / "run.yaml").is_file():
        path = path / "run.yaml"
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return _read_file(path), str(path)
    known = recipe_names()
    if name_or_path not in known and path.is_dir():
        raise FileError(
            f"the folder {path} holds no recipe",
            found="no run.yaml",
            expected=EXPECTED.replace(", or", ",") + ", or the folder of a run",
            do="give the file itself",
        )
    if name_or_path not in known:
        raise RecipeError(
            f"unknown recipe {name_or_path!r}",
            found=ascii(name_or_path),
            expected=EXPECTED,
            do=did_you_mean(name_or_path, known, "specctl recipes ls"),
        )
    file = resources.files("specctl.recipes") / f"{name_or_path}.yaml"
    return file.read_text(encoding="utf-8"), f"{name_or_path}.yaml"


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileError(
            f"the recipe file {path} does not exist",
            found="no such file",
            expected=EXPECTED,
            do=did_you_mean(path.stem, recipe_names(), f"specctl recipes cp eagle3 {path}"),
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"the recipe file {path} cannot be read",
            found=str(error),
            expected="a readable UTF-8 text file",
            do="specctl recipes ls",
        ) from error


def load_recipe(
    name_or_path: str,
    sets: Sequence[str] = (),
    target: str | None = None,
    flags: Mapping[str, Any] | None = None,
    named: Mapping[str, str] | None = None,
) -> Recipe:
    """A checked recipe. `flags` are dotted fields set by options of the command line, such as
    {"data.source": "chats.jsonl"}, and `named` says by which, {"data.source": "--data"}; `target`
    is the flag target.name. --set wins over all."""
    text, where = read_source(name_or_path)
    tree = _as_tree(parse_yaml(text, where), where)
    name = str(tree.get("name") or Path(where).stem)
    tree.setdefault("name", name)
    origin = dict.fromkeys(flatten(tree), f"recipe {name}")
    given = dict(flags or {})
    if target is not None:
        given["target.name"] = target
    for field, value in given.items():
        _place(tree, field, value, where)
        origin[field] = (named or {}).get(field, "command line")
    for text in sets:
        field, value = parse_set(text)
        _place(tree, field, value, f"--set {text}")
        origin.update(dict.fromkeys(_leaves(field, value), "--set"))
    return build_recipe(tree, where, sets).with_origin(origin)


def with_fields(recipe: Recipe, fields: Mapping[str, Any], said_by: str) -> Recipe:
    """The recipe with dotted fields changed, and checked again; `said_by` is their origin."""
    tree, origin = recipe.to_json(), recipe.origin
    for field, value in fields.items():
        _place(tree, field, value, said_by)
        origin |= dict.fromkeys(_leaves(field, value), said_by)
    return build_recipe(tree, said_by).with_origin(origin)


def build_recipe(tree: Mapping[str, Any], where: str, sets: Sequence[str] = ()) -> Recipe:
    """Check a tree of plain values; the first problem is raised by file and field."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        found = sorted(error.errors(), key=lambda p: p["type"] != "extra_forbidden")
        problems = [explain(dict(problem), where, sets) for problem in found]
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


def list_recipes() -> list[RecipeInfo]:
    """Every recipe that comes with specctl, by name."""
    infos = []
    for name in recipe_names():
        recipe = load_recipe(name)
        part = (recipe.drafter.family, recipe.target.name, recipe.summary, recipe.paper)
        infos.append(RecipeInfo(name, *part))
    return infos


def _as_tree(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(
            "a recipe is a mapping of sections",
            where=where,
            found=type(value).__name__,
            expected="keys such as target, drafter, data, train, serve",
            do="specctl recipes cp eagle3 my-recipe.yaml  (and edit that)",
        )
    # A run.yaml holds the resolved recipe beside the origin of its values and the command.
    inner = value.get("recipe")
    return dict(inner) if isinstance(inner, dict) else value


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
