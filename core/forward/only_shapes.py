"""Whether tensors have a shape and no content: while a plan traces a step on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ONLY_SHAPES = ContextVar("_ONLY_SHAPES", default=False)


@contextmanager
def only_shapes() -> Iterator[None]:
    """Inside, tensors have no content. What reads content says there what it does instead."""
    token = _ONLY_SHAPES.set(True)
    try:
        yield
    finally:
        _ONLY_SHAPES.reset(token)


def has_only_shapes() -> bool:
    """True inside `only_shapes()`."""
    return _ONLY_SHAPES.get()
