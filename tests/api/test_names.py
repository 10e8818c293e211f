"""The functions of the package: found by name, whatever was imported before."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import specctl

ROOT = Path(__file__).parents[2]
CALLED_FIRST = """
import specctl
for call, words in ((specctl.train, 2), (specctl.export, 3)):
    try:
        call(*["no-such-name"] * words)
    except specctl.SpecctlError as error:
        print("refused")
from specctl.train.run import RunResult
from specctl.export.formats import formats
assert specctl.train.__name__ == "specctl.train"
"""


def test_train_and_export_are_functions_behind_the_import_of_their_rooms(tmp_path: Path) -> None:
    from specctl.export import formats
    from specctl.train import loop

    assert specctl.train.loop is loop  # type: ignore[attr-defined]
    assert specctl.export.formats is formats  # type: ignore[attr-defined]
    with pytest.raises(specctl.SpecctlError, match="no-such-recipe"):
        specctl.train("tiny", "no-such-recipe")
    with pytest.raises(specctl.SpecctlError, match="package"):
        specctl.export(tmp_path, "hf", tmp_path / "out")


def test_train_and_export_are_functions_before_the_import_of_their_rooms() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLED_FIRST],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused\n" * 2, done.stderr[-2000:]


@pytest.mark.parametrize("name", sorted({*specctl.__all__} - {"__version__", "SpecctlError"}))
def test_every_name_can_be_called_and_says_what_it_takes(name: str) -> None:
    found = getattr(specctl, name)
    assert callable(found)
    assert inspect.signature(found).parameters


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        specctl.no_such  # noqa: B018
