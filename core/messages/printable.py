"""What strings of others (names, files, packages, models) may do to a terminal: be read.

Control characters other than newline and tab, and the marks that turn the direction of writing
around, are shown as escapes. A sequence that would move the cursor, write to the clipboard or
disguise a name begins with one of them, so what is left of it is text.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

C0, C1 = range(0x20), range(0x7F, 0xA0)  # DEL among the second
BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
SURROGATES = range(0xD800, 0xE000)  # bytes of a file name that are no UTF-8
SHOWN = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*C0, *C1, *BIDI, *SURROGATES)
    if chr(code) not in "\n\t"
}
# How progress bars of libraries begin what they write: back to the line's start, up a line.
MOVES = re.compile(r"(?:[\r\n]|\x1b\[A)*")


def printable(text: str) -> str:
    """The text with everything that would drive a terminal as an escape such as \\x1b."""
    return text.translate(SHOWN)


def counted(count: int, one: str, many: str = "") -> str:
    """A count with its word: "1 row", "1,200 rows", "2 families"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def one_line(text: str) -> str:
    """The same where nothing but one line belongs: a cell, a label, a command to be typed."""
    return printable(text).replace("\n", "\\n")


class PrintableStream:
    """A stream for those who know nothing of terminals: what they write to it is printable."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        start = MOVES.match(text)
        assert start is not None, "no moves are a match, too"
        self._stream.write(start[0] + printable(text[start.end() :]))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Within, whatever libraries print and log is printable; in a pipe, stdout stays as it is."""
    output: Any = PrintableStream(sys.stdout) if sys.stdout.isatty() else sys.stdout
    errors: Any = PrintableStream(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        yield
