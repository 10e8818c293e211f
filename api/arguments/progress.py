"""Where a call reports to: nowhere, a Reporter, or a function that is handed every event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from specctl.core.errors import SpecctlError
from specctl.runtime.measure.reporter import EventReporter, Reporter, SilentReporter


class ProgressEvent(dict[str, Any]):
    """What a `progress` function is called with: the objects that --jsonl writes. `event` is
    "message" or "warning" (with `text`), or "progress" (with `task`, `done`, `total`, `unit`,
    `seconds`, `note`, `is_over`). Prints as one line, so `progress=print` will do."""

    def __str__(self) -> str:
        if self["event"] != "progress":
            return ("warning: " if self["event"] == "warning" else "") + str(self["text"])
        line = f"{self['task']}: {self['done']:,}/{self['total']:,} {self['unit']}"
        return f"{line} | {self['note']}" if self["note"] else line


Progress = Reporter | Callable[[ProgressEvent], object] | None


def as_reporter(progress: Progress) -> Reporter:
    """The Reporter behind a `progress` argument; None is silence."""
    if progress is None:
        return SilentReporter()
    if hasattr(progress, "task") and hasattr(progress, "say"):
        return cast(Reporter, progress)
    if not callable(progress):
        raise SpecctlError(
            "progress cannot be called",
            where="progress",
            found=type(progress).__name__,
            expected="a function of one event, such as print, or a Reporter",
            do="progress=print",
        )
    call = progress

    def write(body: dict[str, Any]) -> None:
        call(ProgressEvent(body))

    return EventReporter(write)


def warnings_of(reporter: Reporter) -> tuple[str, ...]:
    """What was warned of, as far as the reporter keeps it."""
    return tuple(getattr(reporter, "warnings", ()))
