"""Where measured and compiled things are kept between commands: $XDG_CACHE_HOME/specctl, else
~/.cache/specctl, and a private folder of the temporary files where nobody has a home or the home
cannot be written to (a container that runs as any user). No torch.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str) -> Path:
    """The folder of that name in the cache, which need not be there yet. PermissionError where
    there is none that can be used."""
    base = _usual()
    place = None if base is None else base / "specctl" / name
    if place is not None and (_is_folder(place) or _is_writable(place.parent)):
        return place
    return _temporary() / name


def make_private(place: Path) -> None:
    """Make the folder if it is not there; PermissionError where others may write to it, or may
    put another in the place of a folder that it lies in."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(place)


def check_private(place: Path) -> None:
    """PermissionError where somebody else may write to a folder, or move one that it lies in."""
    if not hasattr(os, "getuid"):
        return
    real = place.resolve()
    about = real.stat()
    if about.st_uid != os.getuid() or about.st_mode & OTHERS:
        raise PermissionError(f"others may write to {place}")
    for parent in real.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"others may write to {parent}, in which {place} lies")


def _usual() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and no entry in the system's list of users
        return None


def _is_folder(place: Path) -> bool:
    try:
        return place.is_dir()
    except OSError:
        return False


def _is_writable(place: Path) -> bool:
    """Whether a folder can be made there: its nearest parent that exists can be written to."""
    there = next((each for each in (place, *place.parents) if _is_folder(each)), None)
    return there is not None and os.access(there, os.W_OK | os.X_OK)


def _temporary() -> Path:
    """A folder of ours among the temporary files, where others can put links and folders, too."""
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    place = Path(tempfile.gettempdir()) / f"specctl{user}"
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    about = place.lstat()
    is_ours = not user or (about.st_uid == os.getuid() and not about.st_mode & OTHERS)
    if not (stat.S_ISDIR(about.st_mode) and is_ours):
        raise PermissionError(f"{place} is not a folder that only you may write to")
    return place
