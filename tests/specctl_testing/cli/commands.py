"""Commands found in errors and documents, taken apart the way the program does."""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import Any

import typer

from specctl.cli.app.failures import USAGE_ERROR
from specctl.cli.main import COMMANDS, app, load_command

SHOWN = {"--help", "--help-all"}


def program_words(text: str) -> list[str]:
    """The words after `specctl` of the first command in a text; an explanation after two blanks or
    in brackets does not belong to it."""
    found = re.search(r"specctl (.*)", text)
    assert found is not None, f"no command in {text!r}"
    command = re.split(r"`|  | \(|\)$|, then|;| shows ", found[1])[0]
    return shlex.split(command, comments=True)


@cache  # what a command line is taken apart with is made of signatures, which stay
def _command(name: str) -> Any:
    return load_command(name)


@cache
def _program() -> Any:
    return typer.main.get_command(app)


def why_not(words: list[str]) -> str | None:
    """Why the program would refuse these words as a command line; None if it would not."""
    found = parsed(words)
    return found if isinstance(found, str) else None


def parsed(words: list[str]) -> Any:
    """The context that the program makes of a command line, None of one that shows help; else why
    it would refuse the words."""
    while words and words[0] in ("--json", "--quiet", "-q", "-v", "--verbose", "--no-color"):
        words = words[1:]
    if not words or not SHOWN.isdisjoint(words) or words == ["--version"]:
        words = [w for w in words if w not in SHOWN and w != "--version"]
        return None if not words or words[0] in COMMANDS else f"no command {words[0]}"
    if words[0] not in COMMANDS:
        return f"no command {words[0]}"
    command = _command(words[0])
    rest = words[1:]
    parent = _program().make_context("specctl", ["recipes"])
    if hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return f"no command {words[:2]}"
        command, rest = command.commands[rest[0]], rest[1:]
    try:
        return command.make_context(words[0], list(rest), parent=parent)
    except USAGE_ERROR as error:
        return str(error)


def has_flag(command: str, flag: str) -> bool:
    """Whether a command takes an option of that name."""
    parameters = _command(command).params
    return any(flag in (*each.opts, *each.secondary_opts) for each in parameters)
