"""One process per run folder: a lock file that names its holder and dies with it. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from specctl.core.errors import FileError
from specctl.runtime.measure.reporter import Reporter

NAME = "run.lock"
PATIENCE = 50  # times a hundredth of a second that a lock is asked for


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def live_holder(folder: Path) -> Holder | None:
    """The process that holds the folder now. Whether one does, the kernel says, or the server of a
    shared file system; a name alone may be that of a container that was started again."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        named = _named(descriptor)
        return None if named is None or _is_free(descriptor) else named
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path, reporter: Reporter, records: Collection[str] = ()) -> Iterator[None]:
    """Hold the folder; a second process raises FileError. The kernel drops the lock of a dead
    process, so its file is taken over with a note, whatever host it names. A folder that was made
    for this, and in which nothing but files of the names `records` was written, goes again: what a
    mistake on the command line began is no run."""
    path, is_new = folder / NAME, not folder.exists()
    descriptor = _taken(path, reporter)
    try:
        body = json.dumps(asdict(Holder(os.getpid(), socket.gethostname())))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, body.encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
            if is_new:
                _leave_nothing(folder, {NAME, *records})
    finally:
        os.close(descriptor)


def _leave_nothing(folder: Path, records: Collection[str]) -> None:
    """Remove a folder that holds nothing but these files; the lock, which is ours, last."""
    paths = sorted(folder.iterdir(), key=lambda path: path.name == NAME)
    if all(path.name in records for path in paths):
        for path in paths:
            path.unlink()
        folder.rmdir()


def _taken(path: Path, reporter: Reporter) -> int:
    """The lock file, open and held; made anew if whoever held it before has just removed it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            left = _take(descriptor, path)
            is_there = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        except BaseException:
            os.close(descriptor)
            raise
        if is_there:
            if left is not None:
                reporter.say(f"took over the lock of {left}, which is gone")
            return descriptor
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> Holder | None:
    """Take the lock; returns the dead process that its file still names. One that is refused is
    asked for again for half a second: somebody may only be looking, or a holder that just began
    may not have written its name yet."""
    for _ in range(PATIENCE):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _named(descriptor)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _unlockable(error, path) from error
        time.sleep(0.01)
    raise _held(_named(descriptor), path)


def _named(descriptor: int) -> Holder | None:
    """The process that the file names; None if it is empty or names none."""
    try:
        fields = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(int(fields["pid"]), str(fields["host"]))
    except (ValueError, KeyError, TypeError):
        return None


def _is_free(descriptor: int) -> bool:
    """True if nobody holds the file. Looks by a shared lock, dropped at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _held(holder: Holder | None, path: Path) -> FileError:
    return FileError(
        "another process uses this run folder",
        found="a process" if holder is None else str(holder),
        expected="one process per folder",
        do="wait for it, or choose another --out",
        where=str(path),
    )


def _unlockable(error: OSError, path: Path) -> FileError:
    return FileError(
        "cannot lock the run folder",
        found=str(error),
        expected="a file system with locks",
        do="choose another --out",
        where=str(path),
    )
