"""Console: the one place where commands speak. Results go to stdout, everything else to stderr.

Names and messages of others are `printable` wherever they are shown. Text that was requested
(`write`) goes into a pipe byte for byte; on a terminal it is printable, too.

With --json nothing but one object is written to stdout:
{"schema": "specctl.<command>/1", "ok": ..., "result": ..., "warnings": [...], "next": [...]}
With --jsonl stdout holds one object a line: what would be said on stderr as events, then that one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO

from specctl.cli.app.progress import EventProgress, PlainProgress, Progress, RichProgress
from specctl.core.errors import SpecctlError
from specctl.core.messages.printable import one_line, printable
from specctl.core.messages.table import Table, format_table
from specctl.runtime.measure.reporter import Advance, SilentReporter

ACCEPTED, PLAIN_COLOUR = "\x1b[32m", "\x1b[0m"  # tokens that were drafted and accepted; others
USUAL_COLUMNS = 80  # of a terminal
STOPPED = (75, 130, 143)  # exit codes of Ctrl-C and SIGTERM


class Console:
    """Implements `runtime.report.Reporter`. One writer: the command that runs."""

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.stdout = stdout if stdout is not None else sys.stdout
        self.stderr = stderr if stderr is not None else sys.stderr
        self.command = "specctl"
        self.json = self.jsonl = self.quiet = self.verbose = False
        self.color = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.warnings: list[str] = []
        self.is_answered = False
        self.result: dict[str, Any] | None = None  # what an error still may report with --json
        self.kept: Callable[[], str | None] = _nothing  # on the disk, for the command to go on from
        self.remains: Callable[[], str | None] = _nothing  # there too, but it would begin anew
        self.rerun: Callable[[Sequence[str]], int] | None = None  # main() with this console
        self._progress: Progress | None = None

    def configure(
        self,
        *,
        json: bool = False,
        jsonl: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        color: bool = True,
    ) -> None:
        """Apply the flags that every command takes; they may stand before or after its name."""
        self.json |= json or jsonl
        self.jsonl |= jsonl
        self.quiet |= quiet
        self.verbose |= verbose
        self.color &= color
        self._progress = None

    # -- everything that is not the result ---------------------------------------------------------

    def say(self, text: str) -> None:
        if self.is_main and not self.quiet:
            self._bars().print(text)

    def detail(self, text: str) -> None:
        """Said only with --verbose."""
        if self.verbose:
            self.say(text)

    def warn(self, text: str) -> None:
        if text in self.warnings:
            return
        self.warnings.append(text)
        if self.is_main and not self.quiet:
            if self.jsonl:
                self._event({"event": "warning", "text": text})
            else:
                self._bars().print(f"warning: {text}")

    def heading(self, text: str) -> None:
        self.say(f"\n== {text}")

    def task(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        if self.quiet or not self.is_main:
            return SilentReporter().task(label, total, unit)
        return self._bars().task(label, total, unit)

    def _bars(self) -> Progress:
        if self._progress is None:
            if self.jsonl:
                self._progress = EventProgress(self._event)
            elif self.color and self.stderr.isatty():
                from rich.console import Console as RichConsole

                self._progress = RichProgress(RichConsole(file=self.stderr))
            else:
                self._progress = PlainProgress(self.stderr)
        return self._progress

    def event(self, body: dict[str, Any]) -> None:
        """Something that happened, for --jsonl alone."""
        if self.jsonl and self.is_main:
            self._event(body)

    def _event(self, body: dict[str, Any]) -> None:
        """A line of --jsonl."""
        line = {"schema": f"specctl.{self.command}/1", **body}
        json.dump(line, self.stdout, ensure_ascii=True, allow_nan=False, default=str)
        self.stdout.write("\n")
        self.stdout.flush()

    # -- the result --------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """A piece of the requested text, as it comes."""
        self._send(printable(text) if self.stdout.isatty() else text)

    def colour(self, sequence: str) -> None:
        """A control sequence of ours, for a terminal that shows colours."""
        self._send(sequence)

    def out(self, text: str = "") -> None:
        """A line of the result for people."""
        self._send(printable(text) + "\n")

    def _send(self, text: str) -> None:
        if self.is_main and not self.json:
            self.stdout.write(text)
            self.stdout.flush()

    def prose(self, text: str) -> None:
        """A paragraph of the result for people, wrapped between words at the terminal's edge."""
        self.out(self._wrapped(text, self.stdout))

    def explain(self, text: str) -> None:
        """A paragraph beside the result, wrapped in the same way."""
        self.say(text if self.jsonl else self._wrapped(text, self.stderr))

    def _wrapped(self, text: str, stream: TextIO) -> str:
        width, text = self._width(stream), printable(text)
        if width is None:
            return text
        return textwrap.fill(text, max(20, width), break_long_words=False, break_on_hyphens=False)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = ""
    ) -> None:
        """A table of the result for people; columns of numbers are right-aligned."""
        if self.json or not self.is_main:
            return
        if title:
            self.out(title)
        for line in format_table(columns, rows, self._width(self.stdout)):
            self.out(line)

    def show(self, table: Table) -> None:
        """A table and the lines below it."""
        self.table(table.columns, table.rows)
        for note in table.notes:
            self.out(note)

    def done(self, result: dict[str, Any], next: Sequence[str] = (), ok: bool = True) -> None:
        """The end of a command: the object with --json, the Next lines otherwise."""
        if not self.is_main:
            return
        self.is_answered = True
        if self.json:
            self._object({"ok": ok, "result": result, "warnings": self.warnings, "next": [*next]})
            return
        self.stdout.flush()
        for line in next:
            self.say(f"Next: {one_line(line)}")

    def fail(self, error: SpecctlError, code: int | None = None) -> None:
        """An error in four parts: on stderr for people, as an object with --json."""
        code = int(error.exit) if code is None else code
        do = error.do or f"specctl {self.command} --help".replace("specctl specctl", "specctl")
        parts = {
            "what": error.what,
            "where": error.where,
            "found": error.found,
            "expected": error.expected,
            "do": do,
        }
        if self.json and self.is_main and not self.is_answered:
            body = {"code": code, **parts}
            answer = {"ok": False, "result": self.result, "warnings": self.warnings}
            self._object({**answer, "next": [do], "error": body})
        if self.is_main:
            head = f"error[{code}]: {error.what}" if code not in STOPPED else error.what
            lines = [printable(head)]
            lines += [self._part(name, parts[name]) for name in list(parts)[1:] if parts[name]]
            text = "\n".join(lines)
            if code in STOPPED and self.stderr.isatty():
                text = "\n" + text  # behind a ^C, or text that stands unfinished on the line
            if self.jsonl:
                print(text, file=self.stderr, flush=True)
            else:
                self._bars().print(text)

    def _part(self, name: str, text: str) -> str:
        """A part of an error, wrapped for a terminal; what is to be typed stays in one piece."""
        text = printable(text)
        width = None if name == "do" else self._width(self.stderr)
        if width is None:
            return f"  {name + ':':9} " + text.replace("\n", "\n" + " " * 12)
        lines = textwrap.wrap(
            text, max(20, width - 13), break_long_words=False, break_on_hyphens=False
        )
        return f"  {name + ':':9} " + ("\n" + " " * 12).join(lines)

    @property
    def columns(self) -> int:
        """How long a line that is cut may be: as the terminal or COLUMNS says, else 80."""
        return self._width(self.stdout) or USUAL_COLUMNS

    def cut(self, text: str, width: int) -> str:
        """A text on one line of this width: what does not fit is left out behind a word."""
        mark = "\N{HORIZONTAL ELLIPSIS}"
        try:
            mark.encode(self.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            mark = "..."
        return textwrap.shorten(
            printable(text), max(width, 1 + len(mark)), placeholder=mark, break_on_hyphens=False
        )

    def _width(self, stream: TextIO) -> int | None:
        """Columns of the terminal (or what COLUMNS says); None where lines may have any length."""
        if stream.isatty():
            return shutil.get_terminal_size().columns
        wanted = os.environ.get("COLUMNS", "")
        return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else None

    def _object(self, body: dict[str, Any]) -> None:
        self.is_answered = True
        self._event({"event": "result", **body} if self.jsonl else body)


def _nothing() -> None:
    """What most commands leave on the disk when they are stopped."""


def has_colours(console: Console) -> bool:
    """Whether stdout is a terminal that shows colours."""
    return console.color and console.stdout.isatty() and not console.json
