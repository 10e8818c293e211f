"""The program in a terminal of its own: keys in, what is shown out."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[3]
CTRL_C = b"\x03"


class Terminal:
    """`with Terminal(["generate", "x"]) as terminal: terminal.until("text"); terminal.press(...)`.

    One writer: whoever reads from it (`until`, `wait`) appends to `shown`.
    """

    def __init__(self, words: list[str], columns: int = 80, **environment: str) -> None:
        self.words, self.columns, self.environment = words, columns, environment
        self.shown = ""

    def __enter__(self) -> Terminal:
        self.keys, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, self.columns, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specctl", *self.words],
            env={
                **kept,
                "PYTHONPATH": str(ROOT / "src"),
                "TERM": "xterm",
                "OMP_NUM_THREADS": "1",
                **self.environment,
            },
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)
        return self

    def until(self, text: str, seconds: float = 300.0) -> str:
        """Reads until `text` is shown; what was shown so far."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.shown[-2000:]}"
            assert self._read() or self.process.poll() is None, f"it ended: {self.shown[-2000:]}"
        return self.shown

    def settle(self, seconds: float = 0.5) -> None:
        """Reads until nothing has come for so long and the process sleeps: it waits for keys. A
        signal that reaches readline between its last look at signals and its wait for keys is only
        seen with the next key."""
        quiet = time.monotonic()
        while time.monotonic() - quiet < seconds:
            if self._read() or not self._sleeps():
                quiet = time.monotonic()

    def _sleeps(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "S"

    def press(self, keys: bytes = CTRL_C) -> None:
        os.write(self.keys, keys)

    def wait(self, seconds: float = 300.0) -> int:
        """Reads to the end; the exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end: {self.shown[-2000:]}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def hang_up(self, seconds: float = 120.0) -> int:
        """Closes the terminal, as a lost connection does; the exit code."""
        os.close(self.keys)
        self.keys = os.open(os.devnull, os.O_RDONLY)
        return self.process.wait(seconds)

    def _read(self) -> bool:
        if not select.select([self.keys], [], [], 0.1)[0]:
            return False
        try:
            piece = os.read(self.keys, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += piece.decode("utf-8", errors="replace")
        return bool(piece)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.keys)

    @property
    def cursor_is_shown(self) -> bool:
        """The last word about the cursor was to show it."""
        return self.shown.rfind("\x1b[?25l") <= self.shown.rfind("\x1b[?25h")
