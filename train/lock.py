"""One process per run folder: a lock file that names its holder and dies with it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.recipes.errors import FileError
from specctl.runtime.report import Reporter

NAME = "run.lock"


@contextmanager
def locked(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Hold the folder; a second process raises FileError. The kernel drops the lock of a dead
    process, so its file is taken over with a note; a holder on another host is never overruled."""
    path = folder / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, path, reporter)
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, reporter: Reporter) -> None:
    text = os.pread(descriptor, 4096, 0).decode(errors="replace")
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
        raise _held(text, path) from None
    text = os.pread(descriptor, 4096, 0).decode(errors="replace")
    if not text.strip():
        return
    if _field(text, "host") != socket.gethostname():
        raise _held(text, path)
    reporter.say(f"took over the lock of process {_field(text, 'pid')}, which is gone")


def _held(text: str, path: Path) -> FileError:
    return FileError(
        "another process uses this run folder",
        found=f"process {_field(text, 'pid')} on {_field(text, 'host')}",
        expected="one process per folder",
        do=f"wait for it, choose another --out, or, if it is surely gone, rm {path}",
        where=str(path),
    )


def _field(text: str, name: str) -> str:
    try:
        return str(json.loads(text)[name])
    except (ValueError, KeyError, TypeError):
        return "unknown"
