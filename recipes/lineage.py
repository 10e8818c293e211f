"""A recipe and those that it is based on: `based_on: NAME` lays its fields over the fields of NAME.

Mappings are merged field by field; a list or a plain value, null too, takes the place of what the
parent says. Name and summary are each recipe's own. A recipe that names another family takes over
nothing of `drafter`, nor the paper: they are about the parent's family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from os.path import isfile
from pathlib import Path
from typing import Any

from specctl.core.errors import RecipeError, did_you_mean
from specctl.recipes.files import (
    Source,
    base_names,
    parse_yaml,
    read_source,
    recipe_names,
    shipped,
    tree_of,
)
from specctl.recipes.schema import DrafterPart
from specctl.recipes.section import flatten

BASED_ON = "based_on"
OWN = ("name", "summary")
PARENT = "a name of `specctl recipes ls --all`, or a path as seen from the file that names it"


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What one file of a lineage says. `tree` is shared between readers: it is never changed."""

    source: Source
    tree: Mapping[str, Any]
    parent: str | None

    @property
    def name(self) -> str:
        return str(self.tree.get("name") or Path(self.source.where).stem)


def lineage(name_or_path: str | Path) -> list[Layer]:
    """The recipe and its parents, the furthest first."""
    return _with_parents(_layer(read_source(name_or_path)))


def lineage_of(tree: Mapping[str, Any], where: str) -> list[Layer]:
    """The same of a recipe in memory; paths are seen from the working directory."""
    return _with_parents(_split(Source("", where), tree))


def overlay(layers: list[Layer]) -> tuple[dict[str, Any], dict[str, Layer]]:
    """The fields of all, the later over the earlier; and whose every dotted field is."""
    tree: dict[str, Any] = {}
    origin: dict[str, Layer] = {}
    for layer in layers:
        tree = _merged(_inherited(tree, layer.tree), layer.tree)
        said = flatten(layer.tree)
        origin = {f: layer if f in said else origin.get(f, layer) for f in flatten(tree)}
    return tree, origin


def _with_parents(layer: Layer) -> list[Layer]:
    chain = [layer]
    while chain[-1].parent is not None:
        source = _source_of_parent(chain[-1])
        places = [_place(one.source) for one in chain]
        chain.append(_layer(source))
        if _place(source) in places:
            raise RecipeError(
                "these recipes are based on each other in a circle",
                where=f"{chain[-2].source.where}:{BASED_ON}",
                found=" -> ".join(one.source.where for one in chain),
                expected="a chain of parents that ends",
                do=f"take {BASED_ON} out of one of them",
            )
    return chain[::-1]


def _source_of_parent(child: Layer) -> Source:
    name = child.parent or ""
    known = [*recipe_names(), *base_names()]
    if name in known:
        return shipped(name)
    path = child.source.path or Path()
    path = path.parent / Path(name).expanduser()
    if isfile(path) or isfile(path / "run.yaml"):  # False, too, of what can be no file's name
        return read_source(path)
    raise RecipeError(
        f"unknown recipe {name[:80]!r}",
        where=f"{child.source.where}:{BASED_ON}",
        found=f"neither a recipe of that name, nor the file {path}"[:200],
        expected=PARENT,
        do=did_you_mean(name, known, "specctl recipes ls --all"),
    )


def _place(source: Source) -> Path | str:
    return source.where if source.path is None else source.path.resolve()


@lru_cache(maxsize=512)
def _layer(source: Source) -> Layer:
    return _split(source, tree_of(parse_yaml(source.text, source.where), source.where))


def _split(source: Source, tree: Mapping[str, Any]) -> Layer:
    """The tree without the name of its parent."""
    parent = tree.get(BASED_ON)
    if parent is not None and (not isinstance(parent, str) or not parent):
        raise RecipeError(
            f"{BASED_ON} is not valid",
            where=f"{source.where}:{BASED_ON}",
            found=repr(parent)[:120],
            expected=PARENT,
            do=f"{BASED_ON}: eagle3",
        )
    return Layer(source, {k: v for k, v in tree.items() if k != BASED_ON}, parent)


def _inherited(tree: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    named, earlier = _family(child), _family(tree, DrafterPart().family)
    is_other = None not in (named, earlier) and named != earlier
    kept_back = (*OWN, "drafter", "paper") if is_other else OWN
    return {key: value for key, value in tree.items() if key not in kept_back}


def _family(tree: Mapping[str, Any], default: str | None = None) -> Any:
    drafter = tree.get("drafter")
    return drafter.get("family", default) if isinstance(drafter, Mapping) else None


def _merged(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """A new tree: neither of the two is changed by what is done to it."""
    found = {k: _copied(v) for k, v in parent.items() if k not in child}
    for key, value in child.items():
        below = parent.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = _merged(below, value) if both else _copied(value)  # type: ignore[arg-type]
    return {key: found[key] for key in (*parent, *(k for k in child if k not in parent))}


def _copied(value: Any) -> Any:
    return _merged({}, value) if isinstance(value, Mapping) else value
