"""--config-file: defaults for flags, by command; what is typed wins, what is unknown is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import Exit


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "specctl.yaml"
        path.write_text(text)
        return path

    return write


def steps(ran: Any) -> int:
    return int(ran.json["result"]["recipe"]["train"]["steps"])


SHOW = ("recipes", "show", "eagle3", "--json")


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_file_gives_defaults_wherever_it_is_named(where: str, run: Any, config: Any) -> None:
    file = ("--config-file", config("recipes: {show: {set: [train.steps=41]}}"))
    assert steps(run(*file, *SHOW) if where == "before" else run(*SHOW, *file)) == 41


def test_what_is_typed_wins(run: Any, config: Any) -> None:
    file = config("recipes: {show: {set: [train.steps=41]}}")
    assert steps(run(*SHOW, "--config-file", file, "--set", "train.steps=42")) == 42


def test_a_flag_outside_a_section_is_for_every_command_that_has_it(run: Any, config: Any) -> None:
    file = config("set: [train.steps=43]\ntemperature: 0.5\n")
    assert steps(run(*SHOW, "--config-file", file)) == 43
    assert run("recipes", "ls", "--config-file", file).code == 0


def test_the_environment_can_name_the_file(
    run: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECCTL_CONFIG_FILE", str(config("set: [train.steps=44]")))
    assert steps(run(*SHOW)) == 44


@pytest.mark.parametrize(
    ("text", "code", "do"),
    [
        ("recips: {show: {}}", Exit.RECIPE, "write recipes instead of recips"),
        ("recipes: {show: {sett: [a=1]}}", Exit.RECIPE, "write set instead of sett"),
        ("tarjet: tiny", Exit.RECIPE, "write target instead of tarjet"),
        ("recipes: 4", Exit.RECIPE, "generate: {temperature: 0.8}"),
        ("- 1", Exit.RECIPE, "generate: {temperature: 0.8}"),
        ("json: [", Exit.RECIPE, ""),
        ("quiet: maybe", Exit.USAGE, "specctl recipes show --help"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    text: str, code: int, do: str, run: Any, config: Any
) -> None:
    file = config(text)
    ran = run(*SHOW, "--config-file", file)
    assert ran.code == code
    assert do in ran.json["error"]["do"]
    assert str(file) in ran.json["error"]["where"]


def test_a_missing_file_is_named(run: Any, tmp_path: Path) -> None:
    ran = run(*SHOW, "--config-file", tmp_path / "absent.yaml")
    assert ran.code == Exit.FILE
    assert "absent.yaml" in ran.json["error"]["what"]
