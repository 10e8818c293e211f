"""Write a whole folder or nothing: temp folder beside it, fsync, one rename.

The old folder stays complete until the new one stands. On Linux the two are exchanged in one
system call; elsewhere the old one is moved aside first, and put back if the second rename fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.core.errors import FileError, ResourceError

_AT_FDCWD = -100
_EXCHANGE = 2
IDLE = 24 * 3600  # seconds without a change after which a temporary folder has no writer
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")  # numpy's word for it, without errno


@contextmanager
def new_folder(out: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A fresh folder to write into; on success it becomes `out`, on failure it vanishes.

    An existing `out` is replaced only if it is empty or `is_ours` says so.
    """
    out = Path(os.path.abspath(out))
    temp = out.parent / f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _refuse_foreign(out, is_ours)
        temp.mkdir(parents=True)
        _sweep(out)
        yield temp
        for path in temp.iterdir():
            _share(path)
            _fsync(path)
        _fsync(temp)
        _swap(temp, out)
        _fsync(out.parent)
    except OSError as error:
        raise _explained(error, out) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def write_file(path: Path, body: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())


def _refuse_foreign(out: Path, is_ours: Callable[[Path], bool]) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if out.is_dir() and not out.is_symlink() and (not any(out.iterdir()) or is_ours(out)):
        return
    raise FileError(
        "refused to overwrite something that specctl did not write",
        found=str(out),
        expected="a new path, an empty folder, or a package and nothing else",
        do="choose another --out, or move that folder away yourself",
    )


def _explained(error: OSError, out: Path) -> FileError | ResourceError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in FULL or _SHORT_WRITE.search(reason):
        return ResourceError(
            "not enough disk space for the package; what was there before is unchanged",
            found=reason,
            expected="room for the package",
            do="free some space, then run the same command again",
            where=str(out),
        )
    return FileError(
        "cannot write the package; what was there before is unchanged",
        found=reason,
        do="check the rights of the folder, or choose another --out",
        where=str(out),
    )


def _share(path: Path) -> None:
    """Whoever may enter the folder may read the file: some libraries write for the owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(temp: Path, out: Path) -> None:
    """Put `temp` in the place of `out`; whatever stood there ends up at `temp` or is deleted."""
    if not out.exists():
        temp.replace(out)
    elif not _exchange(temp, out):
        aside = out.parent / f".{out.name}.old-{os.getpid()}-{secrets.token_hex(4)}"
        out.replace(aside)
        try:
            temp.replace(out)
        except OSError:
            aside.replace(out)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """renameat2(RENAME_EXCHANGE); False where the system or the file system has none."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0)


def _sweep(out: Path) -> None:
    """Delete what killed writers of the same folder left behind."""
    pattern = re.compile(re.escape(f".{out.name}.tmp-") + r"(\d+)-[0-9a-f]{8}")
    for path in out.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and _is_left(path, int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path, pid: int) -> bool:
    """Whether nobody writes this folder any more. Process ids come again, in a container always the
    same: one that lives is believed for a day after the last change. What holds anything else
    than files (a writer makes no others) is somebody's, whatever its name."""
    try:
        files = [path, *path.iterdir()]
        newest = max(file.lstat().st_mtime for file in files)
        is_ours = path.is_dir() and not path.is_symlink()
        is_ours &= all(file.is_file() and not file.is_symlink() for file in files[1:])
    except OSError:
        return False
    return is_ours and (not _alive(pid) or time.time() - newest > IDLE)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
