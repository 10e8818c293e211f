"""Which recipes were made for a target. A recipe's numbers (steps, rows, rate) fit the target that
it names: those of the embedded one are a demonstration of minutes. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.recipes.files import recipe_names
from specctl.recipes.lineage import Layer, lineage, overlay
from specctl.recipes.targets import resolve

DEMONSTRATION = "tiny"
REAL = 300_000_000  # parameters from which a demonstration says nothing about a target
PLACEHOLDER = "chats.jsonl"  # data.source where a user is to bring the data
CHATS = (
    "Give your chats with --data (a JSONL file of messages); the target writes the answers anew. "
)
UNTESTED = (
    "Not run at this size here: the source of every figure stands beside it, or why it is ours. "
    "Measure before you trust it."
)
USUAL = ("eagle3", "distill", "medusa")  # how the names of the usual choices end, the first first
PREFERRED = ("eagle3", "small-lm")  # families, where several other recipes were made for a target


def target_of(recipe: str) -> str:
    """The target that a recipe itself names."""
    return _named(overlay(lineage(recipe))[0])


def advice(layers: list[Layer]) -> str:
    """What is to be known of every recipe that comes with specctl for a real target."""
    tree, _ = overlay(layers)
    if layers[-1].source.path is not None or _named(tree) == DEMONSTRATION:
        return ""
    data = tree.get("data", {})
    return (CHATS if data.get("source") == PLACEHOLDER else "") + UNTESTED


def _named(tree: Mapping[str, Any]) -> str:
    target = tree.get("target")
    name = target.get("name") if isinstance(target, Mapping) else None
    return str(name or DEMONSTRATION)


def is_same(name: str, other: str) -> bool:
    """Whether two names of targets mean the same folder or repository."""
    return name == other or (_repo(name) is not None and _repo(name) == _repo(other))


def _repo(name: str) -> str | None:
    """The repository that a target's name means; None where it means none, as the hub id of a
    recipe does beside a folder called like its owner."""
    try:
        return resolve(name).repo
    except SpecctlError:
        return None


def made_for(target: str, families: Collection[str] = ()) -> list[str]:
    """Recipes that come with specctl and name this target, of these families if any are given; the
    usual choice first."""
    found = []
    for name in recipe_names():
        tree, _ = overlay(lineage(name))
        family = tree.get("drafter", {}).get("family")
        if is_same(target, _named(tree)) and (not families or family in families):
            found.append((usual_first(name, family), name))
    return [name for _, name in sorted(found)]


def usual_first(name: str, family: str) -> tuple[int, bool, int, str]:
    """What sorts the recipes of a target: the usual choices before all others."""
    ends = [name == end or name.endswith(f"-{end}") for end in USUAL]
    rank = ends.index(True) if True in ends else len(USUAL)
    return rank, family not in PREFERRED, len(name), name
