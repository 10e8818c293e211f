"""Names of published drafters: the package folders of the room `published`, which come with
specctl."""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_FILE = "manifest.json"


def published_room() -> Path:
    """The folder that holds them."""
    return Path(str(files("specctl.published")))


def place_of_name(name: str) -> Path:
    """Where the drafter of that name lies, or would lie."""
    return published_room() / name


def published_names() -> tuple[str, ...]:
    """Every published drafter, in alphabetical order; what a killed writer left is none."""
    found = (file.parent.name for file in published_room().glob(f"*/{_FILE}"))
    return tuple(sorted(name for name in found if NAME.fullmatch(name)))


def published_folder(name: str | Path) -> Path | None:
    """The folder of the published drafter of that name; None where there is none, or where the
    word is a path or something that lies here."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None or Path(name).exists():
        return None
    folder = place_of_name(name)
    return folder if (folder / _FILE).is_file() else None


def path_named(name: str | Path) -> Path:
    """The path that a drafter's name stands for: of a published one its folder, else the name. A
    text that begins with ~ and names no user's home stays as it is."""
    return published_folder(name) or Path(os.path.expanduser(name))
