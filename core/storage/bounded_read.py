"""Reading what may have no end: a device, an endless pipe and a sparse file of a terabyte are
refused before they fill the memory. Errors are those of the operating system, which callers put
into words. No torch.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import IO, Any

MOST = 16 << 20  # bytes of a file of settings
MOST_INPUT = 1 << 30  # bytes of all prompts of a file, or characters of standard input


def open_regular(path: Path) -> IO[bytes]:
    """A regular file, opened for reading; OSError for whatever else has that name."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "a device or a pipe, no file", str(path))
    return file


def read_pipe(path: Path, most: int = MOST_INPUT) -> bytes:
    """All that is written to a pipe, as to the shell's `<(command)`; OSError where that is more, or
    nobody writes to it."""
    with open(path, "rb", opener=_without_waiting) as pipe:
        os.set_blocking(pipe.fileno(), True)  # whoever has opened it may take long to write
        body = bytes(read_stream(pipe, most))
    if not body:
        raise OSError(errno.EINVAL, "a pipe to which nothing was written", str(path))
    return body


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """All bytes of a file, or of a pipe of the shell; OSError where they are more."""
    with path.open("rb") as file:
        body = file.read(most + 1)
    if len(body) > most:
        raise too_long(most, str(path))
    return body


def read_text(path: Path, encoding: str = "utf-8", most: int = MOST) -> str:
    """The text of a file, its line ends as \\n; OSError where it is longer."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding).read()


def read_stream(stream: Any, most: int = MOST_INPUT) -> Any:
    """All that a stream holds, as it gives it (bytes or text); OSError where it is more."""
    parts, total = [], 0
    while part := stream.read(min(1 << 20, most + 1 - total)):
        parts.append(part)
        total += len(part)
        if total > most:
            raise too_long(most, None)
    return type(part)().join(parts)


def too_long(most: int, path: str | None) -> OSError:
    return OSError(errno.EFBIG, f"more than {most:,} bytes", path)


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to would be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
