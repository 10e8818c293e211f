"""What takes seconds is said before it begins, on stderr, and a benchmark says where they went."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.cli.app.console import Console
from specctl.cli.commands.plan import calibration  # as it is: a fixture puts it aside
from specctl.cli.options.target_choice import TargetChoice, loading
from specctl.models.native.library import BUILDING
from specctl_testing.cli.ran import Run


def test_doctor_says_what_it_does_before_it_does_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.cli.commands.doctor.is_to_be_built", lambda: True)
    monkeypatch.setattr("specctl.cli.commands.doctor._namesakes", list)
    ran = run("doctor", "--quick", "--json")
    said = ran.err.splitlines()
    assert said[:2] == ["checking Python, libraries and this machine", BUILDING]
    assert "checks" in ran.json["result"]
    assert "loading torch" in run("doctor").err


def test_a_benchmark_says_what_it_loads_and_how_long_each_part_took(run: Run) -> None:
    began = time.perf_counter()
    few = ("--num-prompts", 1, "--repeats", 1, "--max-new-tokens", 4, "--temperature", 0)
    ran = run("bench", "prompt-lookup", *few, "--json")
    spent = time.perf_counter() - began
    assert ran.code == 0, ran.err
    assert ran.err.splitlines()[0] == "loading target tiny"
    seconds = ran.json["result"]["seconds"]
    assert list(seconds) == ["loading", "costs of a round", "warm-up", "runs"]
    assert 0.5 * spent - 1.0 <= sum(seconds.values()) <= spent + 0.3
    assert loading(TargetChoice("a", inflate="1b")) == "loading target a, and growing it to 1b"


def test_a_calibration_is_announced_and_reports_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def calibrate(*words: Any, reporter: Any) -> None:
        given.append(reporter)

    monkeypatch.setattr("specctl.train.planning.calibration.calibrate", calibrate)
    console = Console(io.StringIO(), errors := io.StringIO())
    recipe: Any = SimpleNamespace(name="eagle3")
    assert calibration(console)(recipe, None) is None  # type: ignore[arg-type]
    assert "calibrating eagle3 here" in errors.getvalue()
    assert given == [console]
    assert console.stdout.getvalue() == ""  # type: ignore[attr-defined]
