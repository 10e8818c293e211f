"""Checks of the plain arguments of the API's functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from specctl.core.errors import RecipeError, SpecctlError, did_you_mean

MOST_ROWS = 1 << 12  # requests that are decoded at once
MOST_DRAFTED = 1 << 12  # tokens of a round


def check_count(name: str, value: Any, most: int, least: int = 1) -> None:
    """SpecctlError unless the argument is a whole number of that range."""
    is_count = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_count or not least <= value <= most:
        raise SpecctlError(
            f"{name} is no count that can be used",
            where=name,
            found=f"{type(value).__name__}: {value!r}"[:80],
            expected=f"a whole number from {least:,} to {most:,}",
            do=f"give another {name}, or leave it out",
        )


def check_settings(
    given: Iterable[str], known: Sequence[str], where: str, expected: str, remedy: str
) -> None:
    """RecipeError for a keyword of `where` that is none of the known ones; `remedy`: what to do
    where none of them is near."""
    for name in given:
        if name not in known:
            raise RecipeError(
                f"unknown setting {name!r}",
                where=where,
                found=name,
                expected=expected,
                do=did_you_mean(name, known, remedy),
            )
