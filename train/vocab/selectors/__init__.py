"""Vocabulary selectors: one module of this folder per way to rank ids, found by its SELECTOR."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from specctl.recipes.errors import RecipeError, nearest
from specctl.train.vocab.selectors.base import Evidence, Selector

__all__ = ["Evidence", "Selector", "selector", "selectors"]


@cache
def selectors() -> dict[str, Selector]:
    """Every selector by name, in alphabetical order."""
    found: dict[str, Selector] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"specctl.train.vocab.selectors.{info.name}")
        if hasattr(module, "SELECTOR"):
            found[module.SELECTOR.name] = module.SELECTOR
    return dict(sorted(found.items()))


def selector(name: str, where: str = "--selector") -> Selector:
    """The selector of that name; an unknown name raises with the nearest known ones."""
    known = selectors()
    if name not in known:
        raise RecipeError(
            f"unknown vocabulary selector {name!r}",
            where=where,
            found=name,
            expected="one of " + ", ".join(known),
            do=f"write {nearest(name, known, 1)}",
        )
    return known[name]
