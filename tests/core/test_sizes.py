"""Sizes in messages: one unit, the decimal one, made in one place."""

import re
from pathlib import Path

import pytest

import specctl
from specctl.core.messages.sizes import size_text

OWN = {"hardware.py", "roof.py"}  # a GPU's memory as it is sold; bytes a second
MADE = re.compile(r"\} [KMG]i?B\b")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (513e6, "513 MB"), (21e8, "2.10 GB"),
     (32e12, "32.0 TB"), (4.5e15, "4,500 TB")],
)  # fmt: skip
def test_a_size_has_the_unit_that_leaves_digits(count: float, text: str) -> None:
    assert size_text(count) == text


def test_no_message_writes_a_size_of_its_own() -> None:
    """A plan in GiB and its refusal in GB would be numbers that nobody can compare."""
    root = Path(specctl.__file__).parent
    files = [file for room in root.iterdir() if room.is_dir() for file in room.rglob("*.py")]
    assert len(files) > 500
    found = [
        str(file)
        for file in files
        if file.name not in OWN | {"image_files.py"} and MADE.search(file.read_text())
    ]
    assert found == []
