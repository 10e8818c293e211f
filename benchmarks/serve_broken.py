"""Drafters that break while they serve: they raise, run out of memory, or draft from NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from serve_common import make_drafter

from specctl.core.drafter import DraftState
from specctl.runtime.target.target import Target
from specctl_testing.runtime.failing import FailingDrafter


class BreakingState(DraftState):
    """A draft state that breaks at its `at`-th proposal."""

    def __init__(self, inner: DraftState, at: int, error: BaseException) -> None:
        self.inner, self.at, self.error = inner, at, error

    def start(self, slot: int, tokens: Any, taps: Any) -> None:
        self.inner.start(slot, tokens, taps)

    def propose(self, view: Any, budget: Any) -> Any:
        self.at -= 1
        if self.at == 0:
            raise self.error
        return self.inner.propose(view, budget)

    def observe(self, outcome: Any) -> None:
        self.inner.observe(outcome)

    def end(self, slot: int) -> None:
        self.inner.end(slot)


class BreakingDrafter:
    """A drafter whose state breaks; everything else is that of a sound one."""

    def __init__(self, inner: Any, at: int, error: BaseException) -> None:
        self.inner, self.at, self.error = inner, at, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, space: Any) -> BreakingState:
        return BreakingState(self.inner.open(space), self.at, self.error)


def _raising(error: BaseException) -> Callable[[Target, int], Any]:
    return lambda target, at: BreakingDrafter(make_drafter(target), at, error)


BREAKS: dict[str, Callable[[Target, int], Any]] = {
    "an exception": _raising(ValueError("a secret")),
    "out of memory on the host": _raising(MemoryError()),
    "out of memory on the device": _raising(torch.OutOfMemoryError("a secret")),
    "a broken assertion": _raising(AssertionError("a secret")),
    "an error of the operating system": _raising(OSError(5, "a secret")),
    "NaN in its distribution": lambda target, at: FailingDrafter(target, "root", at, None, "nan"),
    "infinity in its distribution": lambda target, at: FailingDrafter(
        target, "expand", at, None, "inf"
    ),
    "an exception as it learns": lambda target, at: FailingDrafter(target, "observe", at),
}
