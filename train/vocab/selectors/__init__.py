"""Vocabulary selectors: one module of this folder per way to rank ids, found by its SELECTOR."""

from __future__ import annotations

from functools import cache

from specctl.core.errors import unknown
from specctl.core.plugins import Plugins, plugins
from specctl.train.vocab.selectors.base import Evidence, Selector

__all__ = ["Evidence", "Selector", "selector", "selectors"]


@cache
def selectors() -> Plugins[Selector]:
    """Every selector by name, in alphabetical order."""
    return plugins(__name__, "SELECTOR")


def selector(name: str, where: str = "--selector") -> Selector:
    """The selector of that name; an unknown name raises with the nearest known ones."""
    known = selectors()
    if name not in known:
        raise unknown("vocabulary selector", name, known, where, "specctl vocab-trim --help")
    return known[name]
