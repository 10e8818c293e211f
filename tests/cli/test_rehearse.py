"""`specctl plan --rehearse`: a small run apart, measured, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specctl
from specctl.cli.main import main

SMALL = [
    "data.format=text", "data.prompts=4", "data.new_tokens=8", "data.prompt_tokens=8",
    "data.text_tokens=0", "train.rows=2", "train.seq_len=32", "train.tau_prompts=1",
    "train.tau_tokens=4",
]  # fmt: skip


def test_a_rehearsed_plan_is_measured_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(specctl.__path__[0]).parent))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(100)))
    sets = [word for field in SMALL for word in ("--set", field)]
    words = ["plan", "--recipe", "medusa", "--data", str(text), "--rehearse", "--json", *sets]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["result"]["plan"]
    assert found["basis"].startswith("a rehearsal: ")
    assert 2e8 < found["memory"]["measured in a rehearsal"] < 3e9
    assert found["seconds_range"][0] > 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["words.txt"]
