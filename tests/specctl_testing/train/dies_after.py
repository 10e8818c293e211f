"""A job that is killed while its target writes answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specctl.runtime.measure.reporter import Advance, SilentReporter


class DiesAfter(SilentReporter):
    """A console that interrupts the job when so many prompts are answered."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        def advance(amount: int, note: str = "") -> None:
            self.left -= amount
            if self.left < 0:
                raise KeyboardInterrupt

        yield advance
