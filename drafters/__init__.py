"""Drafter families: one module per method, in the folder of its chapter, found by its FAMILY."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from specctl.core.errors import SpecctlError, unknown
from specctl.core.plugins import Plugins, plugins

if TYPE_CHECKING:
    from specctl.core.drafter import Family


@cache
def families() -> Plugins[Family]:
    """Every family by name, in alphabetical order; a family's module is imported when it is
    taken."""
    return plugins(__name__, "FAMILY")


def family(name: str) -> Family:
    """The family of that name, of which alone the module is imported; an unknown name raises with
    the nearest known ones."""
    known = families()
    if name not in known:
        listed = "specctl recipes ls --all"
        raise unknown("drafter family", name, known, "drafter.family", listed, SpecctlError)
    return known[name]
