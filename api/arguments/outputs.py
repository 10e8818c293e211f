"""Where a command will write: refused before anything is spent, and written with a name."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, SpecctlError
from specctl.core.messages.installed import pip_install

PICTURES = (".png", ".svg", ".pdf")


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be made or written, in the system's own words."""
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def check_file(path: Path | None) -> None:
    """The same for a file that is to be written; None is no file. One that is there (or a device)
    may be written although its folder may not."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.exists():
        check_folder(path.parent)
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_plot(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn: another kind of file, no matplotlib, no place."""
    if path is None:
        return
    check_file(path)
    if path.suffix.lower() not in PICTURES:
        raise FileError(
            f"{path} is not a picture format that can be drawn",
            where="--plot",
            found=path.suffix or "no suffix",
            expected="one of " + ", ".join(PICTURES),
            do=f"--plot {path.with_suffix('.png')}",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise SpecctlError(
            "drawing needs matplotlib",
            where="--plot",
            found="no module matplotlib",
            expected="the optional dependency that draws",
            do=pip_install("plots"),
        )


def write_report(path: Path, body: Mapping[str, Any]) -> None:
    """A result as a JSON file; whatever fails names that file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(json.dumps(body, indent=1) + "\n")
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
