"""What libraries that are not of Python raise. No torch."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether Rust gave up: such an error is no Exception, and ends a program that does not ask."""
    return type(error).__name__ == "PanicException"
