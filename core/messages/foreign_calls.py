"""What libraries that are not of Python raise, put into words. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specctl.core.errors import IncompatibleError, is_out_of_memory

REFUSALS = (TypeError, ValueError, OverflowError, RecursionError)  # UnicodeEncodeError among them


def is_panic(error: BaseException) -> bool:
    """Whether Rust gave up: such an error is no Exception, and ends an unprepared program."""
    return type(error).__name__ == "PanicException"


@contextmanager
def calling_tokenizer(of: str) -> Iterator[None]:
    """Whatever a tokenizer raises for a text or ids, as an error that names its target."""
    try:
        yield
    except BaseException as error:
        is_its_own = type(error) is Exception  # what the library raises where it has no better type
        if is_out_of_memory(error) or not (
            isinstance(error, REFUSALS) or is_its_own or is_panic(error)
        ):
            raise
        raise IncompatibleError(
            f"the tokenizer of {of} does not take this input",
            found=ascii(f"{type(error).__name__}: {error}")[1:-1][:200],
            expected="text of whole characters, or ids of its vocabulary",
            do="write the text as UTF-8 without halves of surrogate pairs; if it is, fetch the "
            "tokenizer again",
        ) from error
