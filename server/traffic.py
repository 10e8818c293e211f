"""Traffic that is kept to train on, opt-in and bounded: what `specctl train-draft --follow` reads.

A folder of numbered segments in the form of `record.py`. Before a segment is begun, the oldest ones
go, so that all of them together never exceed the limit. A line counts as kept when the disk has it:
a killed server loses none of those, and glues nothing to a torn one, for each start begins a
segment of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from specctl.core.errors import FileError, IncompatibleError
from specctl.core.storage.kept_features import feature_files
from specctl.core.storage.traffic_files import (
    Writer,
    has_records,
    next_number,
    note_writer,
    segment_path,
    segments,
    writer_of,
)
from specctl.server.record import Recorder

SEGMENTS = 16  # so many parts of the limit: what is evicted at once


class TrafficKeeper(Recorder):
    """Keeps at most `limit` bytes in `folder`, which nobody else may read where it makes it."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / ".held").touch(0o600)
            self._held = os.open(folder / ".held", os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            hold(self._held)
            first = segment_path(folder, next_number(folder))
        except OSError as error:
            raise FileError(
                "traffic cannot be kept in this folder",
                where=str(folder),
                found=error.strerror or str(error),
                expected="a folder that can be written, in one that exists, of one server",
                do="give another --keep-traffic",
            ) from error
        super().__init__(first, limit // SEGMENTS)

    def begin(self, writer: Writer) -> None:
        """Say whose answers are kept, before the first of them. IncompatibleError where the folder
        holds those of another target: a drafter would learn them as this one's."""
        before = writer_of(self.folder)
        is_other = before is not None and before.fingerprint != writer.fingerprint
        if before is not None and is_other and has_records(self.folder):
            raise IncompatibleError(
                "this folder keeps the traffic of another target",
                where=f"--keep-traffic {self.folder}",
                found=f"answers of {before.name} ({before.fingerprint[:12]})",
                expected=f"an empty folder, or one of {writer.name} ({writer.fingerprint[:12]})",
                do="give another --keep-traffic",
            )
        note_writer(self.folder, writer)

    def close(self) -> None:
        """Write what waits, and end. Any number of times."""
        if self._thread.is_alive():
            super().close()
            os.close(self._held)

    def _open(self) -> int:
        self._evict()
        return super()._open()

    def _evict(self) -> None:
        """Room for one whole segment, by what is oldest; and nothing of starts without traffic."""
        for path in segments(self.folder):
            if not path.stat().st_size:
                path.unlink()
        found = [*self._kept_beside(), *segments(self.folder)]
        total = sum(path.stat().st_size for path in found)
        for path in found:
            if total + self.max_bytes <= self.limit:
                return
            total -= path.stat().st_size
            path.unlink()

    def _kept_beside(self) -> list[Path]:
        """Features that an earlier server has kept: they count, and go before texts."""
        return feature_files(self.folder)

    def _append(self, line: bytes) -> None:
        super()._append(line)
        os.fsync(self._file)

    def _rotate(self) -> None:
        self.path = segment_path(self.folder, next_number(self.folder))
        old, self._file = self._file, self._open()
        os.close(old)


def hold(file: int) -> None:
    """Have it for this process alone; OSError where another one has it. It ends with the process.
    Nothing is checked where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
