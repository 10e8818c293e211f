"""Progress of long jobs: bars with rate and ETA on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TextIO

from specctl.core.messages.printable import PrintableStream, counted, one_line, printable
from specctl.runtime.measure.reporter import Advance, EventReporter

DAY = 86_400  # seconds
PLAIN_SECONDS = 15.0
NARROW = 80  # columns of a terminal below which only the figures are shown
RECENT_SECONDS = 60.0  # of a task: the pace from which the rest is estimated


class Progress(Protocol):
    """What shows the tasks of one command."""

    def task(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]: ...

    def print(self, text: str) -> None: ...


def duration(seconds: float) -> str:
    """12.3 -> "12s", 75 -> "1m15s", 3700 -> "1h01m", 100,000 -> "1d03h", 10^7 -> "115 days"."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < DAY:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole < 100 * DAY:
        return f"{whole // DAY}d{whole % DAY // 3600:02d}h"
    return f"{whole // DAY:,} days"


class RecentPace:
    """Units a second over the last RECENT_SECONDS. What a task reports first is the start of the
    measurement, not part of it: it was done by an earlier run, or it pays for compiling and
    allocating. One writer: the task."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()  # times and units done, oldest first

    def add(self, now: float, done: int) -> None:
        self._points.append((now, done))
        while len(self._points) > 2 and self._points[1][0] <= now - RECENT_SECONDS:
            self._points.popleft()

    @property
    def rate(self) -> float | None:
        """None until there is something to measure."""
        if len(self._points) < 2:
            return None
        (start, before), (now, done) = self._points[0], self._points[-1]
        return (done - before) / (now - start) if now > start else None


def plural(unit: str) -> str:
    return unit if unit.endswith("s") else f"{unit}s"


def rate_text(rate: float, unit: str) -> str:
    unit = plural(unit)
    return f"{rate:,.0f} {unit}/s" if rate >= 20 else f"{rate:.2g} {unit}/s"


class PlainProgress:
    """At most one line every PLAIN_SECONDS per task, and one when a slow task ends."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock

    def print(self, text: str) -> None:
        print(printable(text), file=self.stream, flush=True)

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        label = one_line(label)
        started = shown = self.clock()
        pace, done = RecentPace(), 0
        last_note = ""

        def advance(amount: int, note: str = "") -> None:
            nonlocal done, shown, last_note
            now = self.clock()
            done += amount
            pace.add(now, done)
            last_note = one_line(note) or last_note
            if now - shown >= PLAIN_SECONDS:
                shown = now
                self.print(_line(label, done, total, unit, pace.rate, last_note))

        yield advance
        spent = self.clock() - started
        if spent >= 2.0:
            note = f" | {last_note}" if last_note else ""
            many = plural(unit)
            what = counted(done, many.removesuffix("s"), many)
            self.print(f"{label}: {what} in {duration(spent)}{note}")


def _line(label: str, done: int, total: int, unit: str, rate: float | None, note: str) -> str:
    parts = [f"{label}: {done:,}/{total:,} {plural(unit)}"]
    if rate:
        parts += [rate_text(rate, unit), f"eta {duration((total - done) / rate)}"]
    return " | ".join([*parts, note] if note else parts)


class EventProgress(EventReporter):
    """Events for programs."""

    def print(self, text: str) -> None:
        self.say(text)


class RichProgress:
    """Live bars on stderr; tasks may nest."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self._bars: Any = None
        self._open = 0

    def print(self, text: str) -> None:
        shown = printable(text)
        self.console.print(shown, markup=False, emoji=False, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        if self._bars is None:
            self._bars = _make_bars(self.console)
            self._bars.start()
            _guard_what_bars_redirect()
            # The bars hide the cursor; left visible, no way of dying can leave it hidden.
            self.console.show_cursor(True)
        self._open += 1
        task_id = self._bars.add_task(one_line(label), total=total, note="", rate="")
        pace, done = RecentPace(), 0

        def advance(amount: int, note: str = "") -> None:
            nonlocal done
            done += amount
            pace.add(time.monotonic(), done)
            fields = {"note": one_line(note)} if note else {}
            rate = rate_text(pace.rate, unit) if pace.rate else ""
            self._bars.update(task_id, advance=amount, rate=rate, **fields)

        try:
            yield advance
        finally:
            self._open -= 1
            if self._open == 0:
                self._bars.stop()
                self._bars = None


def _guard_what_bars_redirect() -> None:
    """While bars are shown, rich takes what libraries print and lets styles and links through; it
    puts back what was there before when the bars end."""
    from rich.file_proxy import FileProxy

    for name in ("stdout", "stderr"):
        if isinstance(getattr(sys, name), FileProxy):
            setattr(sys, name, PrintableStream(getattr(sys, name)))


def _make_bars(console: Any) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    label = TextColumn("{task.description}", markup=False)
    parts = [label, BarColumn(bar_width=24), MofNCompleteColumn()]
    rate = TextColumn("{task.fields[rate]}", markup=False)
    eta = [TextColumn("eta"), TimeRemainingColumn(compact=True)]
    if console.width < NARROW:
        columns = [parts[0], parts[2], *eta]
    else:
        note = TextColumn("{task.fields[note]}", markup=False)
        columns = [*parts, rate, TimeElapsedColumn(), *eta, note]
    return Progress(*columns, console=console, refresh_per_second=4)
