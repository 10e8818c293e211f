"""Reporter: how long jobs speak. The command line implements it; libraries only call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Advance(Protocol):
    """Move a task forward by `amount` units; `note` is a short live figure such as "tau 2.31"."""

    def __call__(self, amount: int, note: str = "") -> None: ...


class Reporter(Protocol):
    """Lines and progress of a long job, all on stderr."""

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def task(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]: ...


class SilentReporter:
    """Says nothing; keeps warnings for whoever asks."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        del text

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        del label, total, unit

        def advance(amount: int, note: str = "") -> None:
            del amount, note

        yield advance
