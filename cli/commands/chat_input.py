"""What a person types in a chat, and what Ctrl-C means while it is answered."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from specctl.cli.app.console import Console
from specctl.cli.options.prompts import check_text
from specctl.core.errors import FileError

BLOCK = '"""'
PROMPT, MORE = "> ", "... "


class Lines:
    """Turns of the user: typed at a prompt, or lines of a pipe. A line that ends with a backslash
    goes on in the next; a block begins and ends with three quotes. One writer: the chat."""

    def __init__(self, console: Console) -> None:
        self.is_typed = sys.stdin.isatty()
        self._shows_prompt = self.is_typed and not console.quiet
        self._edits = self.is_typed and console.stdout.isatty()
        self._stderr = console.stderr
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() then has editing and history)

    def read(self) -> str | None:
        """The next turn; None at the end of the input."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.strip().startswith(BLOCK):
            return self._block(line.strip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._line(MORE)
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        lines = [first] if first else []
        while not (lines and lines[-1].rstrip().endswith(BLOCK)):
            more = self._line(MORE)
            if more is None:
                return "\n".join(lines)
            lines.append(more)
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines if lines[-1] else lines[:-1])

    def _line(self, prompt: str) -> str | None:
        try:
            line = self._typed(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise FileError(
                "the input is not UTF-8 text",
                where="standard input",
                found=str(error),
                do="iconv -t utf-8 turns.txt | specctl chat",
            ) from error
        check_text(line, None)
        return line

    def _typed(self, prompt: str) -> str:
        if self._edits:
            return input(prompt if self._shows_prompt else "")
        if self._shows_prompt:
            print(prompt, end="", file=self._stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")


class Interrupts:
    """Ctrl-C while a chat runs: the first stops the answer, the next one leaves.

    `with interrupts.answering():` around an answer; `is_stopped` is asked between its rounds. A
    Ctrl-C at the prompt raises KeyboardInterrupt; so does the second one anywhere. `fresh()` when
    the user has said something. One writer: the chat and its signals, both in the main thread.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_answering = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *about: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def fresh(self) -> None:
        self.count = 0

    def is_stopped(self) -> bool:
        return self.count > 0

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        self._is_answering = True
        try:
            yield
        finally:
            self._is_answering = False

    def _heard(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
        if self.count > 1 or not self._is_answering:
            raise KeyboardInterrupt
