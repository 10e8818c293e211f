"""Console: the one place where commands speak. Results go to stdout, everything else to stderr.

With --json nothing but one object is written to stdout:
{"schema": "specctl.<command>/1", "ok": ..., "result": ..., "warnings": [...], "next": [...]}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO

from specctl.cli.progress import PlainProgress, Progress, RichProgress
from specctl.recipes.errors import SpecctlError
from specctl.runtime.report import Advance, SilentReporter


class Console:
    """Implements `runtime.report.Reporter`. One writer: the command that runs."""

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.stdout = stdout if stdout is not None else sys.stdout
        self.stderr = stderr if stderr is not None else sys.stderr
        self.command = "specctl"
        self.json = self.quiet = self.verbose = False
        self.color = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.warnings: list[str] = []
        self.is_answered = False
        self.result: dict[str, Any] | None = None  # what an error still may report with --json
        self._progress: Progress | None = None

    def configure(
        self, *, json: bool = False, quiet: bool = False, verbose: bool = False, color: bool = True
    ) -> None:
        """Apply the flags that every command takes; they may stand before or after its name."""
        self.json |= json
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
            self._bars().print(f"warning: {text}")

    def heading(self, text: str) -> None:
        self.say(f"\n== {text}")

    def task(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        if self.quiet or not self.is_main:
            return SilentReporter().task(label, total, unit)
        return self._bars().task(label, total, unit)

    def _bars(self) -> Progress:
        if self._progress is None:
            if self.color and self.stderr.isatty():
                from rich.console import Console as RichConsole

                self._progress = RichProgress(RichConsole(file=self.stderr))
            else:
                self._progress = PlainProgress(self.stderr)
        return self._progress

    # -- the result --------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """A piece of the result for people, as it comes."""
        if self.is_main and not self.json:
            self.stdout.write(text)
            self.stdout.flush()

    def out(self, text: str = "") -> None:
        """A line of the result for people."""
        self.write(text + "\n")

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = ""
    ) -> None:
        """A table of the result for people; columns of numbers are right-aligned."""
        if self.json or not self.is_main:
            return
        if title:
            self.out(title)
        for line in format_table(columns, rows):
            self.out(line)

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
            self.say(f"Next: {line}")

    def fail(self, error: SpecctlError, notes: Sequence[str] = ()) -> None:
        """An error in four parts: on stderr for people, as an object with --json."""
        do = error.do or f"specctl {self.command} --help".replace("specctl specctl", "specctl")
        parts = {
            "what": error.what,
            "where": error.where,
            "found": error.found,
            "expected": error.expected,
            "do": do,
        }
        if self.json and self.is_main and not self.is_answered:
            body = {"code": int(error.exit), **parts}
            answer = {"ok": False, "result": self.result, "warnings": self.warnings}
            self._object({**answer, "next": [do], "error": body})
        if self.is_main:
            lines = [f"error[{int(error.exit)}]: {error.what}"]
            lines += [f"  {k + ':':9} {parts[k]}" for k in list(parts)[1:] if parts[k]]
            self._bars().print("\n".join([*lines, *notes]))

    def _object(self, body: dict[str, Any]) -> None:
        self.is_answered = True
        answer = {"schema": f"specctl.{self.command}/1", **body}
        json.dump(answer, self.stdout, ensure_ascii=True, allow_nan=False, default=str)
        self.stdout.write("\n")
        self.stdout.flush()


def format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table: left-aligned text, right-aligned figures, two blanks between."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells), 0) for i, c in enumerate(columns)]
    numeric = [_looks_numeric(cells, i) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        padded = [
            v.rjust(w) if right else v.ljust(w)
            for v, w, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return [line(columns), line(["-" * min(w, 40) for w in widths]), *(line(row) for row in cells)]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _looks_numeric(cells: Sequence[Sequence[str]], column: int) -> bool:
    values = [row[column].replace(",", "") for row in cells if row[column] != "-"]
    return bool(values) and all(_is_number(value) for value in values)


def _is_number(text: str) -> bool:
    try:
        float(text.removesuffix("x").removesuffix("%"))
    except ValueError:
        return False
    return True
