"""Write a whole folder or nothing: temp folder beside it, fsync, one rename.

    .NAME.tmp-PID-HEX   being written: all of it is ours
    .NAME.old-PID-HEX   what stood at NAME (or, for a moment, the whole new folder)

The old folder stays complete until the new one stands. On Linux the two are exchanged in one
system call; elsewhere the old one is moved aside first, and put back if the second rename fails.
Of an old folder only the files go that specctl wrote: entries beginning with a dot move into the
new folder, also those that came while it was written, and for any other entry it is refused. A kill
at any point leaves either folder whole and loses nothing: the next writer of NAME clears up.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specctl.core.errors import FileError, ResourceError
from specctl.core.storage.files import Disk

_AT_FDCWD = -100
IDLE = 24 * 3600  # seconds without a change after which a temporary folder has no writer
_NO_REPLACE, _EXCHANGE = 1, 2
_DISK = Disk()
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")  # numpy's word for it, without errno


# The files in a folder that specctl wrote, in the order in which they may be deleted; None for a
# folder that it did not write.
Ours = Callable[[Path], Sequence[str] | None]


@contextmanager
def new_folder(out: Path, ours: Ours) -> Iterator[Path]:
    """A fresh folder to write into; on success it becomes `out`, on failure it vanishes.

    An existing `out` is replaced only if it is empty or holds what `ours` lists, beside entries
    that begin with a dot.
    """
    out = Path(os.path.abspath(out))
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    temp, aside = (out.parent / f".{out.name}.{kind}-{mark}" for kind in ("tmp", "old"))
    try:
        _sweep(out, ours)
        _refuse_foreign(out, ours)
        temp.mkdir(parents=True)
        yield temp
        for path in temp.iterdir():
            _share(path)
            _DISK.fsync_path(path)
        _DISK.fsync_path(temp)
        _put(temp, aside, out, ours)
        _DISK.fsync_path(out.parent)
    except OSError as error:
        raise _explained(error, out) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        _settle(aside, out, ours)
    if aside.is_dir():
        raise FileError(
            "the new folder stands, but not everything beside the old one's files fits into it",
            found=", ".join(ascii(path.name)[1:-1] for path in aside.iterdir())[:200],
            expected="names that are free in the new folder",
            do="move it yourself; nothing of it was deleted",
            where=str(aside),
        )


def _refuse_foreign(out: Path, ours: Ours) -> None:
    found = _foreign(out, ours) if os.path.lexists(out) else None
    if found is not None:
        raise FileError(
            "refused to overwrite something that specctl did not write",
            found=ascii(str(found))[1:-1],
            expected="a new path, an empty folder, or a package and nothing else",
            do="choose another --out, or move that away yourself",
            where=str(out),
        )


def _foreign(out: Path, ours: Ours) -> Path | None:
    """What forbids replacing a folder: itself if it is none of ours, or the first visible entry
    that specctl did not write. None where it may be replaced."""
    if out.is_symlink() or not out.is_dir():
        return out
    if not any(out.iterdir()):
        return None
    names = ours(out)
    if names is None:
        return out
    for path in sorted(out.iterdir()):
        is_file = path.is_file() and not path.is_symlink()
        if not path.name.startswith(".") and not (is_file and path.name in names):
            return path
    return None


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


def _put(temp: Path, aside: Path, out: Path, ours: Ours) -> None:
    """Put `temp` in the place of `out`, unless something foreign has come there meanwhile."""
    if not os.path.lexists(out):
        temp.rename(out)
        return
    temp.rename(aside)  # from here on only the files that specctl wrote are deleted
    _trade(aside, out)
    is_foreign = _foreign(aside, ours) is not None
    if is_foreign:
        _trade(aside, out)
    _DISK.fsync_path(out.parent)
    _clear(aside, out, ours)
    if is_foreign:
        _refuse_foreign(out, ours)


def _trade(first: Path, second: Path) -> None:
    """Exchange two folders: in one system call, or by way of a third name beside the first."""
    if _renamed(first, second, _EXCHANGE):
        return
    third = first.with_name(f"{first.name[:-8]}{secrets.token_hex(4)}")
    second.rename(third)
    try:
        first.rename(second)
    except OSError:
        third.rename(second)
        raise
    third.rename(first)


def _renamed(first: Path, second: Path, flag: int) -> bool:
    """Whether renameat2 did it; False where the system or the file system has none, or refuses."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flag) == 0)


def _clear(aside: Path, out: Path, ours: Ours) -> None:
    """Delete what specctl wrote at `aside` and put everything else into `out`; what has no room
    there stays. Without `ours` (a kill came after the last deletion) all of it is foreign."""
    if aside.is_symlink() or not aside.is_dir():
        return
    with suppress(OSError, FileError):
        names = ours(aside) or ()
        for path in (aside / name for name in names):
            if path.is_file() and not (path.is_symlink() or path.parent.is_symlink()):
                path.unlink()
        for folder in {aside / name for name in names if "/" in name}:
            with suppress(OSError):  # it is not empty: something foreign lies in it
                folder.parent.rmdir()
        for path in list(aside.iterdir()):
            _move_into(path, out)
        aside.rmdir()


def _move_into(path: Path, out: Path) -> None:
    """Move an entry into a folder, never over another one (which outside Linux is looked at, but
    cannot be ruled out in one call)."""
    to = out / path.name
    with suppress(OSError):
        if not _renamed(path, to, _NO_REPLACE) and not os.path.lexists(to):
            path.rename(to)


def _settle(aside: Path, out: Path, ours: Ours) -> None:
    """Finish what a writer of `out` left at `aside`. Where nothing stands at `out` that is what
    stood there, or was about to; where something foreign stands there, it is left alone."""
    with suppress(OSError, FileError):
        if aside.is_dir() and not os.path.lexists(out):
            aside.rename(out)
        elif out.is_dir() and (ours(out) is not None or not any(out.iterdir())):
            _clear(aside, out, ours)


def _sweep(out: Path, ours: Ours) -> None:
    """Clear up after killed writers of the same folder."""
    pattern = re.compile(re.escape(f".{out.name}.") + r"(tmp|old)-(\d+)-[0-9a-f]{8}")
    for path in list(out.parent.iterdir()) if out.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if not match:
            continue
        if not _is_abandoned(path, int(match[2])):
            continue
        if match[1] == "old":
            _settle(path, out, ours)
        elif _holds_files_only(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, pid: int) -> bool:
    """Whether nobody writes this folder any more. Process ids come again, in a container always the
    same: one that lives is believed for a day after the last change."""
    try:
        newest = max(file.lstat().st_mtime for file in (path, *path.iterdir()))
    except OSError:
        return False
    return not _alive(pid) or time.time() - newest > IDLE


def _holds_files_only(path: Path) -> bool:
    """A writer makes plain files; what holds anything else is somebody's, whatever its name."""
    files = list(path.iterdir())
    return not path.is_symlink() and all(f.is_file() and not f.is_symlink() for f in files)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
