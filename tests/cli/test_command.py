"""Functions as commands: groups of options, the flags of every command."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from specctl.cli.app.command import command, unwrap
from specctl.cli.app.console import Console
from specctl.cli.main import COMMANDS, load_command


@dataclass(frozen=True, slots=True)
class Pair:
    left: Annotated[int, typer.Option("--left", min=0)] = 1
    right: Annotated[str, typer.Option("--right")] = "r"


FIVE = Pair(left=5)


def test_a_dataclass_is_one_option_per_field() -> None:
    def body(console: Console, pair: Pair, name: str = "n") -> None:
        seen.append((pair, name, console.quiet))

    seen: list[tuple[Pair, str, bool]] = []
    app = typer.Typer(add_completion=False)
    app.command("x")(command(body))
    program = typer.main.get_command(app)
    for words in ([], ["--left", "3", "--right", "b", "--name", "m", "-q"]):
        console = Console(io.StringIO(), io.StringIO())
        program.main(words, standalone_mode=False, obj=console)
    assert seen == [(Pair(), "n", False), (Pair(3, "b"), "m", True)]


def test_a_default_instance_gives_the_defaults() -> None:
    def body(console: Console, pair: Pair = FIVE) -> None:
        del console
        seen.append(pair)

    seen: list[Pair] = []
    app = typer.Typer(add_completion=False)
    app.command("x")(command(body))
    typer.main.get_command(app).main([], standalone_mode=False, obj=Console())
    assert seen == [FIVE]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "recipes"])
def test_no_option_of_a_command_is_declared_twice(name: str) -> None:
    options = [opt for parameter in load_command(name).params for opt in parameter.opts]
    assert len(options) == len(set(options))


def test_help_paragraphs_are_joined_and_examples_kept() -> None:
    assert unwrap("One\ntwo.\n\nMore:\n\n  a b\n  c d\n") == "One two.\n\nMore:\n\n  a b\n  c d"
