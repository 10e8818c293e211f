"""Examples in a help screen: commands to copy, which a narrow terminal must not break as it breaks
prose. Where one is too long it goes on behind a backslash, as a shell reads it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

COMMAND = re.compile(r"( +)specctl ")
WORD = r"""(?:[^\s"']|"[^"]*"|'[^']*')+"""
PIECE = re.compile(rf"-\S+ (?!-){WORD}|{WORD}")  # a flag stands on one line with its value
BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)
BEYOND = 2  # columns that a help screen keeps free, one on each side
DEEPER = "    "  # of the lines that go on
MARK = " \\"


@contextmanager
def examples_fitted(command: Any) -> Iterator[None]:
    """While help is written, the examples of a command are as wide as the screen."""
    import typer.rich_utils as screen

    whole = command.help
    if whole:
        command.help = fitted(whole, screen._get_rich_console().width - BEYOND)
    try:
        with redirect_stdout(_Trimmed(sys.stdout)):
            yield
    finally:
        command.help = whole


class _Trimmed:
    """A stream that drops blanks at the end of lines, with which rich fills them: behind a blank, a
    backslash does not join lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(BLANKS.sub(r"\1", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fitted(text: str, width: int) -> str:
    """The text, each command of it that is longer than `width` in lines that a shell joins."""
    lines = (_broken(line, width) if COMMAND.match(line) else [line] for line in text.split("\n"))
    return "\n".join(part for parts in lines for part in parts)


def _broken(line: str, width: int) -> list[str]:
    """The line, or lines that end in a backslash but for the last; no piece is broken."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    lines: list[str] = []
    current = ""
    for piece in PIECE.findall(line):
        longer = f"{current} {piece}" if current else f"{indent}{DEEPER if lines else ''}{piece}"
        if current and len(longer) + len(MARK) > width:
            lines.append(current + MARK)
            longer = f"{indent}{DEEPER}{piece}"
        current = longer
    return [*lines, current]
