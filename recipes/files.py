"""Recipe files: which there are, where they lie and what their YAML says.

Beside the recipes lie `bases/`: settings that several recipes share. A base is what `based_on` may
name (lineage.py), and no recipe of the list.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from specctl.core.errors import FileError, RecipeError, did_you_mean
from specctl.core.storage.bounded_read import MOST, read_text
from specctl.recipes.built_in import is_built_in

PRETRAINED = (
    "tiny-target",
    "tiny-hybrid",
    "tiny-diffusion",
    "tiny-learn2pd",
    "tiny-dparallel",
    "tiny-digits",
    "tiny-neighbours",
    "tiny-any-order",
    "tiny-shapes",
    "tiny-shapes-qwen2-vl",
)  # recipes of `specctl pretrain`
NOT_RECIPES = ("sources", "targets", *PRETRAINED)
NODE_BYTES = 64  # of a value in memory, about, beside its text
EXPECTED = "a YAML file, or a name of `specctl recipes ls --all`"


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
        if not isinstance(key, Hashable):
            continue  # refused by construct_mapping
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
        return _value(text)
    except RecursionError as error:
        raise RecipeError(
            "this YAML is nested too deep",
            where=where,
            found="lists or mappings in each other without end",
            expected="sections and their values",
            do="`specctl recipes show eagle3` prints a valid recipe",
        ) from error
    except (ValueError, OverflowError) as error:  # a number of 5,000 digits, the 40th of May
        raise _invalid(where, str(error).partition(";")[0][:120]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise _invalid(place, str(getattr(error, "problem", error) or error)[:300]) from error


def _invalid(place: str, found: str) -> RecipeError:
    return RecipeError(
        "this is not valid YAML",
        where=place,
        found=found,
        expected="YAML with each key once, indented by spaces",
        do="correct that line; `specctl recipes show eagle3` prints a valid recipe",
    )


def _value(text: str) -> Any:
    """The value of a text, whose aliases are followed only where what they make is bounded."""
    loader = RecipeYaml(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        return loader.construct_document(node)  # type: ignore[no-untyped-call]
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]


def _check_size(node: yaml.Node, known: dict[int, int]) -> int:
    """About the bytes of what a node stands for, each alias written out; `known`: those of nodes
    that were seen, 0 of one that is being looked at."""
    if id(node) in known:
        if known[id(node)] == 0:
            raise _too_much(node, "an alias within what it stands for")
        return known[id(node)]
    known[id(node)] = 0
    if isinstance(node, yaml.ScalarNode):
        size = NODE_BYTES + len(node.value)
    else:
        parts = [part for each in node.value for part in (each if type(each) is tuple else (each,))]
        size = NODE_BYTES + sum(_check_size(part, known) for part in parts)
    if size > MOST:
        raise _too_much(node, f"aliases that make more than {MOST:,} bytes of it")
    known[id(node)] = size
    return size


def _too_much(node: yaml.Node, found: str) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, found, node.start_mark)


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a recipe, the name by which errors call it, and its file: None where it comes
    with specctl."""

    text: str
    where: str
    path: Path | None = None


def recipe_names() -> list[str]:
    """The recipes that come with specctl."""
    return list(_listed()[0])


def base_names() -> list[str]:
    """The settings that several of them share."""
    return list(_listed()[1])


@cache  # every recipe that is read, and every parent of it, looks for its name
def _listed() -> tuple[list[str], list[str]]:
    """Recipes and bases, each in alphabetical order."""
    folder = resources.files("specctl.recipes")
    recipes = set(_names(folder.iterdir())) - set(NOT_RECIPES)
    return sorted(recipes), sorted(_names((folder / "bases").iterdir()))


def _names(files: Iterable[Any]) -> list[str]:
    return [f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")]


def read_source(name_or_path: str | Path) -> Source:
    """The text of a recipe: of one that comes with specctl (built_in.py), of a file, or of a run's
    folder."""
    known = recipe_names()
    if is_built_in(name_or_path, [*known, *base_names()], "recipe"):
        return shipped(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir() and (path / "run.yaml").is_file():
        path = path / "run.yaml"
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return Source(_read_file(path), str(path), path)
    if path.is_dir():
        raise FileError(
            f"the folder {path} holds no recipe",
            found="no run.yaml",
            expected=EXPECTED.replace(", or", ",") + ", or the folder of a run",
            do="give the file itself",
        )
    name = str(name_or_path)
    if name in PRETRAINED:
        raise RecipeError(
            f"{name} is a recipe of specctl pretrain",
            found="a recipe that makes a model from nothing, or changes one, without a drafter",
            expected=EXPECTED,
            do=f"specctl pretrain --recipe {name} --out runs/{name}",
        )
    raise RecipeError(
        f"unknown recipe {name!r}",
        found="no recipe and no file of that name",
        expected=EXPECTED,
        do=did_you_mean(name, known, "specctl recipes ls --all"),
    )


def shipped(name: str) -> Source:
    """A recipe or a base that comes with specctl, by its name."""
    folder = resources.files("specctl.recipes")
    file = (folder / "bases" if name in base_names() else folder) / f"{name}.yaml"
    return Source(file.read_text(encoding="utf-8"), file.name)


def _read_file(path: Path) -> str:
    try:
        return read_text(path)
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
            do="specctl recipes ls --all",
        ) from error


def tree_of(value: Any, where: str) -> dict[str, Any]:
    """The sections of a recipe, or of the run.yaml that holds it, as plain values."""
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
