"""Reporter: how long jobs report. The command line implements it; libraries only call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

EVENT_SECONDS = 1.0


class Advance(Protocol):
    """Move a task forward by `amount` units; `note` is a short live figure such as "tau 2.31"."""

    def __call__(self, amount: int, note: str = "") -> None: ...


class Reporter(Protocol):
    """Messages, warnings and progress of a long job."""

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def task(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]: ...


class SilentReporter:
    """Says nothing; keeps warnings to be read later."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        del text

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:

        def advance(amount: int, note: str = "") -> None:
            del amount, note

        yield advance


class EventReporter:
    """Hands every message and warning to `write` as a small mapping, and at most one step of a task
    a second. Keeps warnings to be read later."""

    def __init__(
        self, write: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.write, self.clock = write, clock
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        if text.strip():
            self.write({"event": "message", "text": text.strip()})

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            self.write({"event": "warning", "text": text})

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        started = self.clock()
        shown, done, last_note = started - EVENT_SECONDS, 0, ""

        def event(is_over: bool) -> None:
            figures = {"task": label, "done": done, "total": total, "unit": unit}
            seconds = round(self.clock() - started, 3)
            ending = {"seconds": seconds, "note": last_note or None, "is_over": is_over}
            self.write({"event": "progress", **figures, **ending})

        def advance(amount: int, note: str = "") -> None:
            nonlocal shown, done, last_note
            done, last_note = done + amount, note or last_note
            if self.clock() - shown >= EVENT_SECONDS:
                shown = self.clock()
                event(is_over=False)

        yield advance
        event(is_over=True)
