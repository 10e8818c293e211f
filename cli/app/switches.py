"""Commands and groups whose help names no type beside a switch: it takes no value."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return untyped(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return untyped(super().get_params(ctx))


def untyped(params: list[Any]) -> list[Any]:
    """The parameters, switches without a type."""
    for parameter in params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return params
