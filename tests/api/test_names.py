"""The functions of the package: found by name, whatever was imported before."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import specctl

ROOT = Path(__file__).parents[2]
ROOMS_FIRST = "import specctl.train.loop, specctl.export.formats"
CALLED = """
assert specctl.train.__name__ == "specctl.train" and callable(specctl.train)
from specctl.train.run import RunResult
from specctl import export, train
try:
    specctl.train("tiny", "no-such-recipe")
except specctl.SpecctlError as error:
    assert "no-such-recipe" in error.what
try:
    specctl.export("no-such-package", "hf", "out")
except specctl.SpecctlError as error:
    print("OK")
"""


@pytest.mark.parametrize("first", ["import specctl", ROOMS_FIRST], ids=["call first", "room first"])
def test_train_and_export_are_rooms_and_functions_in_either_order(first: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{first}\nimport specctl{CALLED}"],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "OK\n", done.stderr[-2000:]


@pytest.mark.parametrize("name", sorted({*specctl.__all__} - {"__version__", "SpecctlError"}))
def test_every_name_can_be_called_and_says_what_it_takes(name: str) -> None:
    found = getattr(specctl, name)
    assert callable(found)
    assert inspect.signature(found).parameters


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        specctl.no_such  # noqa: B018
