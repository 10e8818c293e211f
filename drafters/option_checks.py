"""What the options of families are checked by; each refusal names the option and what to write.

A range or a choice stands in the annotation of its option, and `Options` checks it. Options of a
family are a frozen dataclass that extends it, or what extends it already (`nets/options.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from specctl.core.errors import RecipeError, nearest

MOST_IDS = (1 << 31) - 1  # of any vocabulary: that of the target is known where the net is made


@dataclass(frozen=True, slots=True)
class Within:
    """A number of an option (of layers, heads or steps, mostly) is within reason."""

    least: float = 1
    most: float = 10_000

    def check(self, name: str, number: float) -> None:
        if not self.least <= number <= self.most:
            is_small = number < self.least
            raise RecipeError(
                f"{name} of a drafter is too {'small' if is_small else 'large'}",
                where=f"drafter.options.{name}",
                found=str(number),
                expected=f"{self.least:,} to {self.most:,}",
                do=f"write {name}: {self.least if is_small else self.most}",
            )


@dataclass(frozen=True, slots=True)
class OneOf:
    """An option that must be one of a few words."""

    choices: Sequence[str]

    def check(self, name: str, value: str) -> None:
        if value not in self.choices:
            raise RecipeError(
                f"unknown {name} {value!r}",
                where=f"drafter.options.{name}",
                found=str(value),
                expected="one of " + ", ".join(self.choices),
                do=f"write {name}: {nearest(str(value), self.choices, 1)}",
            )


Count = Annotated[int, Within()]
CountOrZero = Annotated[int, Within(0)]


class Options:
    """Checks every option by its annotation, or by the one it overrides, but for None where the
    annotation allows it. What recipes and Python give for a tuple becomes one of its kind."""

    __slots__ = ()

    def __post_init__(self) -> None:
        known = limits(type(self))  # type: ignore[arg-type]  # to mypy no class is hashable
        for name, hint in _types(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is None and NoneType in (hint, *get_args(hint)):
                continue
            if (kind := _element(hint)) is not None:
                object.__setattr__(self, name, tuple(kind(one) for one in value))
            elif name in known:
                known[name].check(name, value)


@cache
def limits(kind: type[Any]) -> dict[str, Within | OneOf]:
    """What checks each option that is checked."""
    found: dict[str, Within | OneOf] = {}
    for base in reversed(kind.__mro__):
        for name, hint in get_type_hints(base, include_extras=True).items():
            found.update((name, limit) for limit in limits_of(hint))
    return found


@cache
def _types(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _element(hint: Any) -> type[Any] | None:
    """X of an option that is tuple[X, ...], or may be None instead."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is tuple:
            return get_args(part)[0]  # type: ignore[no-any-return]
    return None


def limits_of(hint: Any) -> Iterator[Within | OneOf]:
    for part in (hint, *get_args(hint)):  # `Count | None` has it in a part
        for one in getattr(part, "__metadata__", ()):
            if isinstance(one, Within | OneOf):
                yield one


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


def check_rank_chances(chances: Sequence[float]) -> None:
    """Option `chances`: how often the next token is the one of each rank."""
    if not chances or min(chances) <= 0 or sum(chances) > 1:
        raise RecipeError(
            "rank chances are not probabilities",
            where="drafter.options.chances",
            found=str(chances),
            expected="positive numbers that sum to at most 1",
            do="leave chances out to take the default",
        )
