"""Ctrl-C in a terminal: a word about what is kept, a sane terminal, the promised exit code."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specctl.cli import failures, quickstart
from specctl.recipes.errors import Exit


def load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"specctl_tests_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Terminal = load("terminal").Terminal
LONG = ["generate", "--max-new-tokens", "900", "--ignore-eos", "import os"]
TRAINING = (
    "data.text_tokens=0", "data.prompts=8", "data.prompt_tokens=16", "data.new_tokens=16",
    "train.steps=5000", "train.rows=4", "train.seq_len=32", "train.tau_every=5000",
)  # fmt: skip


def test_one_ctrl_c_ends_a_stream_with_130_and_a_word() -> None:
    with Terminal(LONG) as terminal:
        terminal.until("\n")
        terminal.press()
        assert terminal.wait() == failures.INTERRUPTED
        assert "Traceback" not in terminal.shown
        assert "nothing was saved" in terminal.shown
        assert "specctl generate" in terminal.shown
        assert terminal.cursor_is_shown


def test_training_stops_with_75_and_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    words = ["distill", "--out", str(tmp_path / "run")]
    words += [word for setting in TRAINING for word in ("--set", setting)]
    with Terminal(words) as terminal:
        terminal.until("/5000")
        terminal.press()
        assert terminal.wait() == Exit.INTERRUPTED
        assert "Traceback" not in terminal.shown
        assert "is saved" in terminal.shown
        assert "specctl distill --out" in terminal.shown
        assert terminal.cursor_is_shown
    with Terminal(words) as terminal:
        terminal.until("/5000")
        terminal.press()
        terminal.press()
        assert terminal.wait() in (failures.INTERRUPTED, Exit.INTERRUPTED)
        assert "Traceback" not in terminal.shown
        assert terminal.cursor_is_shown


def test_sigterm_ends_with_143(start: Any) -> None:
    process = start(*LONG)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == failures.TERMINATED
    _, errors = process.communicate()
    assert "terminated" in errors
    assert "Traceback" not in errors


def test_an_interrupt_is_an_object_with_json(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specctl.recipes.load.list_recipes", stop)
    ran = run("recipes", "ls", "--json")
    assert ran.code == ran.json["error"]["code"] == failures.INTERRUPTED
    assert ran.json["error"]["do"] == "specctl recipes ls --json"


def test_quickstart_keeps_its_training_when_stopped_later(tmp_path: Path) -> None:
    with pytest.raises(quickstart.SpecctlError) as raised, quickstart.continued(tmp_path):
        raise KeyboardInterrupt
    assert raised.value.exit == Exit.INTERRUPTED
    assert "kept" in raised.value.what
