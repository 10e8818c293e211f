"""The file of the compiled step, from one command to the next: FOLDER/KEY.SHA256.so.

Code is run from it, and a file that lost its end ends the process by a signal. So it is flushed
before it has its name, the name carries the hash of all its bytes, and whatever does not fit is
built again. A build that was given up is remembered, FOLDER/KEY.given-up, for a day.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specctl.core.storage.cache_folder import check_private, make_private
from specctl.core.storage.files import Disk, replace_file

REMEMBERED = 24 * 3600.0  # seconds for which a build that was given up is not tried again
LONGEST = 64 << 20  # bytes: no build of ours is so long
SAID = 2000  # characters of what a compiler says


class GivenUpError(OSError):
    """The step was not built, and is not tried again for a day; the text says why and what then."""


@dataclass(frozen=True, slots=True)
class KeptStep:
    """Where the builds of one source, compiler and processor are kept."""

    folder: Path
    key: str

    def find(self) -> Path | None:
        """The file, if one is there and whole; those that are not are taken away."""
        if not self.folder.is_dir():
            return None
        check_private(self.folder)
        for path in sorted(self.folder.glob(f"{self.key}.*.so")):
            if _is_whole(path):
                return path
            self.drop(path)
        return None

    def drop(self, path: Path) -> None:
        """Take a file away, so that it is built again; processes that have it loaded keep it."""
        with suppress(OSError):  # a folder that can only be read: the next build says so
            path.unlink()

    def build(self, commands: Sequence[Sequence[str]], seconds: float) -> Path:
        """The file that the first of the commands made that can; each is given where to write, as
        its last word. GivenUpError if one takes longer than that, or did so within a day."""
        make_private(self.folder)
        if (reason := self.given_up()) is not None:
            raise GivenUpError(reason)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            made = Path(scratch) / "step.so"
            for words in commands:
                try:
                    code, said = run_bounded((*words, str(made)), seconds, Path(scratch))
                except TimeoutError as error:
                    raise self.give_up(str(error)) from None
                if code == 0:
                    return self._keep(made.read_bytes())
        raise OSError(said.strip().splitlines()[-1] if said.strip() else f"it ended with {code}")

    def given_up(self) -> str | None:
        """Why it is not tried now; None where it is."""
        mark = self._mark
        try:
            age = time.time() - mark.stat().st_mtime
            reason = mark.read_bytes()[:SAID].decode("utf-8", "replace")
        except OSError:
            return None
        if not 0 <= age < REMEMBERED:
            return None
        return f"{reason}; it is tried again after a day, or once {mark} is removed"

    def give_up(self, reason: str) -> GivenUpError:
        """The error, which is remembered."""
        with suppress(OSError):
            replace_file(Disk(), self._mark, reason.encode())
        return GivenUpError(self.given_up() or reason)

    @property
    def _mark(self) -> Path:
        return self.folder / f"{self.key}.given-up"

    def _keep(self, body: bytes) -> Path:
        path = self.folder / f"{self.key}.{hashlib.sha256(body).hexdigest()}.so"
        replace_file(Disk(), path, body)
        return path


def _is_whole(path: Path) -> bool:
    """Whether a file is a regular one that holds what its name says."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            body = file.read(LONGEST + 1)
    except OSError:
        return False
    return hashlib.sha256(body).hexdigest() == path.name.split(".")[1]


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))


def run_bounded(words: Sequence[str], seconds: float, scratch: Path) -> tuple[int, str]:
    """Exit code of a program, and what it said. After so many seconds, or where this process is
    interrupted, it is ended with all that it started: a compiler is often a script."""
    with (
        (scratch / "said").open("w+b") as said,  # a pipe would wait for whoever still holds it
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(seconds)
        except BaseException as error:
            _end_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"it took more than {seconds:g} s and was ended") from None
            raise
        said.seek(0)
        return code, said.read()[-SAID:].decode("utf-8", "replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    kill: Callable[[int, int], None] | None = getattr(os, "killpg", None)
    if kill is None:
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left of it
            kill(process.pid, signal.SIGKILL)
