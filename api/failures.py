"""Exceptions of libraries and of the system that a caller can remedy, as SpecctlError."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from specctl.core.errors import (
    FileError,
    NetworkError,
    ResourceError,
    SpecctlError,
    is_out_of_memory,
)

P = ParamSpec("P")
R = TypeVar("R")
_FILE_ERRORS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}


def raises_user_errors(function: Callable[P, R]) -> Callable[P, R]:
    """The function, raising SpecctlError for whatever its caller can remedy."""

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        try:
            return function(*given, **named)
        except Exception as error:
            found = user_error(error, function.__name__)
            if found is None or found is error:
                raise
            raise found from error

    return call


def user_error(error: BaseException, command: str = "specctl") -> SpecctlError | None:
    """The error as a user meets it; None for a bug of ours."""
    if isinstance(error, SpecctlError):
        return error
    if is_out_of_memory(error):
        return ResourceError(
            "not enough memory",
            found=first_line(error),
            expected="room for the target, the drafter and their caches",
            do=f"specctl doctor shows what is free; then {_smaller(command)}",
        )
    if isinstance(error, OSError):
        return _os_error(error)
    if type(error).__name__ in ("HfHubHTTPError", "ConnectError", "ConnectTimeout", "ReadTimeout"):
        return NetworkError(
            "the hub cannot be reached",
            found=first_line(error),
            expected="network access to the hub, or a local folder",
            do="give a local folder with --target, or try --target tiny (needs no network)",
        )
    return None


def _os_error(error: OSError) -> SpecctlError | None:
    place = str(error.filename) if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            "the disk is full",
            where=place,
            found=error.strerror or str(error),
            expected="free space for the output",
            do="free some space or choose another --out; what was saved before is intact",
        )
    if error.errno == errno.ENOMEM:
        return ResourceError(
            "not enough memory",
            found=str(error),
            expected="room for the target",
            do="close other programs, or choose a smaller target",
        )
    if error.errno == errno.ENOTDIR and place:
        return FileError(
            f"cannot use {place}",
            where=place,
            found="a file, or a path that leads through one",
            expected="a folder, or a path where nothing is yet",
            do="choose another path, such as runs/NAME",
        )
    if error.errno in _FILE_ERRORS and place:
        return FileError(
            f"cannot use {place}",
            where=place,
            found=error.strerror or str(error),
            expected="a path that exists and that you may read and write",
            do=f"check it with `ls -ld {Path(place).parent}`, or choose another path",
        )
    return None


def _smaller(command: str) -> str:
    return {
        "train": "--set train.rows=4 --set train.accumulate=4",
        "train-draft": "--set train.rows=4 --set train.accumulate=4",
        "distill": "--set train.rows=4 --set train.accumulate=4",
        "generate": "use --batch 1 or a smaller --max-new-tokens",
        "bench": "use --batch 1 or a smaller --inflate",
    }.get(command, "use a smaller target or batch")


def first_line(error: BaseException) -> str:
    """What the error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
