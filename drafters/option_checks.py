"""What the options of families are checked by; each refusal names the option and what to write."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.core.errors import RecipeError, nearest


def check_count(name: str, number: float, least: float = 1, most: float = 10_000) -> None:
    """A number of an option (of layers, heads or steps, mostly) is within reason."""
    if not least <= number <= most:
        raise RecipeError(
            f"{name} of a drafter is too {'small' if number < least else 'large'}",
            where=f"drafter.options.{name}",
            found=str(number),
            expected=f"{least:,} to {most:,}",
            do=f"write {name}: {least if number < least else most}",
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """An option that must be one of a few words."""
    if value not in choices:
        raise RecipeError(
            f"unknown {name} {value!r}",
            where=f"drafter.options.{name}",
            found=str(value),
            expected="one of " + ", ".join(choices),
            do=f"write {name}: {nearest(str(value), choices, 1)}",
        )


def check_options(options: object, is_right: bool, names: Sequence[str], expected: str) -> None:
    """Options that have no such check of their own are in range, by themselves and together."""
    if not is_right:
        raise RecipeError(
            "options are out of range",
            where="drafter.options",
            found=", ".join(f"{name} {getattr(options, name)}" for name in names),
            expected=expected,
            do="leave them out to take the defaults",
        )
