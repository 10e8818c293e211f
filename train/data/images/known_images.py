"""The digests of a run's images, kept beside its rows, so that what has not changed is read once.

An image counts as unchanged if its size and both of its times are those of before, and it had
lain for a while when it was read: a file that is written twice within a tick of the clock of its
file system looks the same both times. Whoever shows an image to a target hashes it in any case.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from specctl.core.storage.files import write_json

FILE = "image-digests.json"
SETTLED = 2.0  # seconds: no file system in use has coarser times

Stamp = list[int]  # bytes, then the times of contents and of the entry in ns


class KnownImages:
    """Digests by path, those of `folder` to begin with. One writer."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._before = _read(self.file)
        self._now: dict[str, tuple[Stamp, str]] = {}

    def digest(self, source: str, read: Callable[[str], bytes]) -> str:
        """sha256 of an image, which `read` gives if it has to be read. Raises what `read` does."""
        stamp = None if source.startswith("data:") else _stamp(source)
        stored = self._now.get(source, self._before.get(source))
        if stamp is not None and stored is not None and stored[0] == stamp:
            self._now[source] = stored
            return stored[1]
        began = time.time_ns()
        found = hashlib.sha256(read(source)).hexdigest()
        if stamp is not None and max(stamp[1:]) + SETTLED * 1e9 < began and _stamp(source) == stamp:
            self._now[source] = stamp, found
        return found

    def save(self) -> None:
        """Keep the digests of this run, where that is not there already."""
        if self._now != self._before:
            write_json(self.file, self._now)


def _stamp(path: str) -> Stamp | None:
    """None for what cannot be looked at: whoever reads it says why."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _read(file: Path) -> dict[str, tuple[Stamp, str]]:
    """Nothing of a file that is not there, or not as `save` wrote it: images are read then."""
    try:
        listed = json.loads(file.read_bytes())
        return {path: ([*map(int, stamp)], str(digest)) for path, (stamp, digest) in listed.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
