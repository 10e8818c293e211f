"""`specctl show` of a GGUF file: what it is, and whether it can be a target."""

from __future__ import annotations

import struct
from pathlib import Path

from specctl_testing.cli.ran import Run


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_a_file_is_shown_by_its_types_sizes_and_ends(run: Run, tiny_gguf: Path) -> None:
    ran = run("show", str(tiny_gguf))
    assert ran.code == 0
    assert "F32 100%" in ran.out
    assert "(gguf, tokenizer" in ran.out
    assert f"generate --target {tiny_gguf} --draft prompt-lookup" in ran.err
    result = run("show", str(tiny_gguf.parent), "--json").json["result"]
    assert result["path"] == str(tiny_gguf)
    assert result["config"]["model_type"] == "llama"


def test_a_file_that_is_no_target_is_shown_with_the_reason(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    field = text("general.architecture") + struct.pack("<I", 8) + text("mamba")
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    ran = run("show", str(file))
    assert ran.code == 0
    assert "mamba" in ran.out
    assert "is no target" in ran.err
    assert "Next:" not in ran.err
