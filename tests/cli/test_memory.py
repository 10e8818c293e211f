"""What a command says of the memory that it needed."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from specctl.cli.app import memory
from specctl.cli.app.memory import mapped_bytes, peak_text

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_bytes_of_mapped_files_are_those_that_were_read(tmp_path: Path) -> None:
    file = tmp_path / "features"
    file.write_bytes(bytes(64 * MIB))
    before = mapped_bytes()
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(mapped[i] for i in range(0, len(mapped), 4096)) == 0
        assert mapped_bytes() - before > 60 * MIB


def test_mapped_files_are_named_where_they_are_much_of_the_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "peak_memory", lambda: {"process": 6 * 10**9})
    monkeypatch.setattr(memory, "mapped_bytes", lambda: 3 * 10**9)
    assert peak_text() == "peak memory 6.00 GB (3.00 GB of it mapped files)"
    monkeypatch.setattr(memory, "mapped_bytes", lambda: 100 * MIB)
    assert peak_text() == "peak memory 6.00 GB"
    monkeypatch.setattr(memory, "peak_memory", lambda: {"gpu": 10**9})
    assert peak_text() == "peak memory 1.00 GB on the GPU"
