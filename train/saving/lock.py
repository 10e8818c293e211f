"""One process per run folder: a lock file that names its holder and dies with it. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from specctl.core.errors import FileError
from specctl.runtime.measure.reporter import Reporter

NAME = "run.lock"
PATIENCE = 50  # times a hundredth of a second until a new holder has written its name


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """True if it surely does not run; a process on another host may."""
        if not self.is_here:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def live_holder(folder: Path) -> Holder | None:
    """The process that holds the folder now, as far as can be seen from here; takes no lock that
    a run which is just starting could miss."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        named = _named(descriptor)
        if named is None or named.is_gone:
            return None
        if named.is_here and _is_free(descriptor):
            return None  # the number now belongs to another process
        return named
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Hold the folder; a second process raises FileError. The kernel drops the lock of a dead
    process, so its file is taken over with a note; a holder on another host is never overruled."""
    path = folder / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, path, reporter)
        body = json.dumps(asdict(Holder(os.getpid(), socket.gethostname())))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, body.encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, reporter: Reporter) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise FileError(
                "cannot lock the run folder",
                found=str(error),
                expected="a file system with locks",
                do="choose another --out",
                where=str(path),
            ) from error
        raise _held(_awaited(descriptor), path) from None
    named = _named(descriptor)
    if named is None:
        return
    if not named.is_here:
        raise _held(named, path)
    reporter.say(f"took over the lock of process {named.pid}, which is gone")


def _awaited(descriptor: int) -> Holder | None:
    """Who holds a lock that was refused: it may not have written its name yet."""
    for _ in range(PATIENCE):
        named = _named(descriptor)
        if named is not None and not named.is_gone:
            return named
        time.sleep(0.01)
    return None


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
    name = "a process" if holder is None else f"process {holder.pid} on {holder.host}"
    return FileError(
        "another process uses this run folder",
        found=name,
        expected="one process per folder",
        do=f"wait for it, choose another --out, or, if it is surely gone, rm {path}",
        where=str(path),
    )
