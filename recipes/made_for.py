"""Which recipes were made for a target. A recipe's numbers (steps, rows, rate) fit the target that
it names: those of the embedded one are a demonstration of minutes. No torch."""

from __future__ import annotations

from collections.abc import Collection

from specctl.recipes.load import parse_yaml, read_source, recipe_names
from specctl.recipes.targets import resolve

DEMONSTRATION = "tiny"
REAL = 300_000_000  # parameters from which a demonstration says nothing about a target
PREFERRED = ("eagle3", "small-lm")  # where several recipes were made for a target


def target_of(recipe: str) -> str:
    """The target that a recipe itself names."""
    text, where = read_source(recipe)
    tree = parse_yaml(text, where)
    target = tree.get("target") if isinstance(tree, dict) else None
    name = target.get("name") if isinstance(target, dict) else None
    return str(name or DEMONSTRATION)


def is_same(name: str, other: str) -> bool:
    """Whether two names of targets mean the same folder or repository."""
    if name == other:
        return True
    first, second = resolve(name), resolve(other)
    return first.repo is not None and first.repo == second.repo


def made_for(target: str, families: Collection[str] = ()) -> list[str]:
    """Recipes that come with specctl and name this target, of these families if any are given; the
    usual choice first."""
    found = []
    for name in recipe_names():
        tree = parse_yaml(*read_source(name))
        family = tree.get("drafter", {}).get("family")
        named = tree.get("target", {}).get("name", DEMONSTRATION)
        if is_same(target, named) and (not families or family in families):
            is_usual = family in PREFERRED and name.endswith(family)
            found.append((not is_usual, family not in PREFERRED, len(name), name))
    return [name for *_, name in sorted(found)]
