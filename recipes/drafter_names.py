"""Names of drafters on a command line: one, or several joined by `+`, which share the rows."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from specctl.core.plugins import declared
from specctl.recipes.built_in import say_hidden
from specctl.recipes.files import recipe_names
from specctl.recipes.targets import aliases


def drafter_names(name: str) -> list[str]:
    """The names of which `name` consists: `runs/eagle3+prompt-lookup` are two drafters, unless a
    folder is called so."""
    if "+" not in name or "\0" in name or os.path.exists(os.path.expanduser(name[:1000])):
        return [name]
    return name.split("+")


def drafter_words() -> frozenset[str]:
    """Words that mean a family, a recipe or a target where a drafter is asked for, no folder."""
    return _families().union(recipe_names(), aliases())


def folder_named(name: str | Path) -> Path:
    """The path of a name where only a folder can be meant; the recipe that it hides is said."""
    path = Path(name).expanduser()
    if isinstance(name, str) and name in recipe_names() and path.exists():
        say_hidden(f"{name} is the folder of that name here, not the recipe")
    return path


@cache
def _families() -> frozenset[str]:
    return frozenset(found.name for found in declared("specctl.drafters", "FAMILY").values())
