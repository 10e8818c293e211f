"""Drafter families: one module of this folder per method, found by its FAMILY."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from specctl.recipes.errors import SpecctlError, unknown

if TYPE_CHECKING:
    from specctl.drafters.parts.base import Family


@cache
def families() -> dict[str, Family]:
    """Every family by name, in alphabetical order."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        if not info.ispkg:
            module = importlib.import_module(f"specctl.drafters.{info.name}")
            if hasattr(module, "FAMILY"):
                found[module.FAMILY.name] = module.FAMILY
    return dict(sorted(found.items()))


def family(name: str) -> Family:
    """The family of that name; an unknown name raises with the nearest known ones."""
    known = families()
    if name not in known:
        listed = "specctl recipes ls"
        raise unknown("drafter family", name, known, "drafter.family", listed, SpecctlError)
    return known[name]
