"""Built-in names and folders called alike: one precedence for all of them.

A bare word is the built-in name where there is one: of a recipe, a target's alias, a drafter, a
stop rule. `./eagle3`, any path with a slash and a Path object are the folder, and so is the word
where only folders can be meant (`specctl export`). What is hidden so is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from pathlib import Path


class HiddenName(UserWarning):
    """A word means two things here, and one of them was taken."""


def is_built_in(name: str | Path, names: Container[str], kind: str) -> bool:
    """Whether a word is the built-in name of that kind; a file or folder that it hides is said."""
    if not isinstance(name, str) or name not in names:
        return False
    if Path(name).exists():
        say_hidden(f"{name} is the {kind} of that name; what lies here is ./{name}")
    return True


def say_hidden(note: str) -> None:
    """Commands say it as a warning of theirs."""
    warnings.warn(note, HiddenName, stacklevel=4)


def as_path_word(path: str | Path) -> str:
    """A word that means this path and no built-in name."""
    is_bare = isinstance(path, Path) and path.name == str(path)
    return f"./{path}" if is_bare else str(path)
