"""Ctrl-C in a terminal: a word about what is kept, a sane terminal, the promised exit code."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.app import failures
from specctl.core.errors import Exit
from specctl.runtime.engine.engine import Engine
from specctl.train.runs.folders import read_run
from specctl_testing.cli.terminal import Terminal

LONG = ["generate", "--max-new-tokens", "900", "--set", "sample.ignore_eos=true", "import os"]
TRAINING = (
    "data.text_tokens=0", "data.prompts=8", "data.prompt_tokens=16", "data.new_tokens=16",
    "train.steps=5000", "train.rows=4", "train.seq_len=32", "train.tau_every=5000",
)  # fmt: skip


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    """A run that would be long, on a text of its own: the built-in corpus takes seconds to read."""
    (tmp_path / "words.txt").write_text(
        "\n".join(f"def f{i}(x): return x + {i}" for i in range(99))
    )
    words = ["distill", "--out", str(tmp_path / "run"), "--data", str(tmp_path / "words.txt")]
    return [*words, *(word for setting in TRAINING for word in ("--set", setting))]


def stopping(step: Callable[[Engine], Any], after: int) -> Callable[[Engine], Any]:
    """Engine.step that is met by Ctrl-C after so many rounds."""
    rounds = itertools.count()

    def step_(engine: Engine) -> Any:
        if next(rounds) == after:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    return step_


@pytest.mark.proof  # a stream's end is in the next test, a process's in test_main.py
def test_one_ctrl_c_ends_a_stream_with_130_and_a_word() -> None:
    with Terminal(LONG) as terminal:
        terminal.until("\n")
        terminal.press()
        assert terminal.wait() == failures.INTERRUPTED
        assert "Traceback" not in terminal.shown
        assert "nothing was saved" in terminal.shown
        assert "specctl generate" in terminal.shown
        assert terminal.cursor_is_shown


def test_texts_that_were_generated_before_ctrl_c_are_in_the_answer(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("def main(\nimport os\n")
    monkeypatch.setattr(Engine, "step", stopping(Engine.step, after=5))
    words = [
        "generate",
        "-f",
        str(tmp_path / "prompts.txt"),
        "--batch",
        "2",
        "--set",
        "sample.ignore_eos=true",
    ]
    ran = run(*words, "--json")
    assert ran.code == failures.INTERRUPTED
    outputs = ran.json["result"]["outputs"]
    assert [output["prompt"] for output in outputs] == ["def main(", "import os"]
    assert all(output["token_ids"] and output["finish_reason"] is None for output in outputs)
    assert "is written" in ran.json["error"]["found"]
    monkeypatch.setattr(Engine, "step", stopping(Engine.step, after=5))
    shown = run(*words)
    assert all(output["text"] in shown.out for output in outputs)


def test_training_stops_with_75(training: list[str]) -> None:
    with Terminal(training) as terminal:
        terminal.until("/5000")
        terminal.press()
        assert terminal.wait() == Exit.INTERRUPTED
        assert "Traceback" not in terminal.shown
        assert "is saved" in terminal.shown
        assert "specctl distill --out" in terminal.shown
        assert terminal.cursor_is_shown


@pytest.mark.proof  # within a process it is in test_loop.py
def test_a_second_ctrl_c_leaves_training_at_once(training: list[str]) -> None:
    with Terminal(training) as terminal:
        terminal.until("/5000")
        terminal.press()
        terminal.press()
        # -2: met between two handlers, Python ends itself by the signal; a shell calls that 130
        ends = (failures.INTERRUPTED, Exit.INTERRUPTED, -signal.SIGINT)
        assert terminal.wait() in ends
        assert "Traceback" not in terminal.shown
        assert terminal.cursor_is_shown


@pytest.mark.proof  # what a hang-up does is in test_loop.py, and in test_launch.py for processes
def test_a_terminal_that_is_closed_ends_training_as_sigterm_does(
    tmp_path: Path, training: list[str]
) -> None:
    with Terminal([*training, "--set", "train.save_every=5000"]) as terminal:
        terminal.until("/5000")
        assert terminal.hang_up() == Exit.INTERRUPTED
    assert [save.wrong for save in read_run(tmp_path / "run", hashes=True).saves] == [None]


def test_answers_written_before_ctrl_c_are_kept_and_the_run_goes_on_from_them(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, training: list[str]
) -> None:
    monkeypatch.setattr("specctl.train.data.written.regenerate.slots_for", lambda *words: 2)
    settings = {**dict(s.split("=") for s in TRAINING), "train.steps": 2, "train.tau_every": 2}
    texts = [f"def f{i}(x):\n    return x + {i}\n\nclass A{i}:\n    pass\n" * 4 for i in range(12)]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [*training[:3], "--data", str(data), "--set", "train.tau_tokens=4"]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stopping(Engine.step, after=40))
        ran = run(*words)
    assert ran.code == Exit.INTERRUPTED, ran.err
    assert "finished parts are kept" in ran.err
    assert "do:       specctl distill --out" in ran.err
    kept = {path: path.read_bytes() for path in tmp_path.rglob("answers-*.bin")}
    assert [len(body) > 0 for body in kept.values()] == [True]
    assert run(*words).code == 0
    assert all(path.read_bytes().startswith(body) for path, body in kept.items())


@pytest.mark.proof  # the next test raises it within a command, test_launch.py sends it to processes
def test_sigterm_ends_with_143(start: Any) -> None:
    process = start(*LONG)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == failures.TERMINATED
    _, errors = process.communicate()
    assert "terminated" in errors
    assert "Traceback" not in errors


def test_sigterm_that_a_library_reports_as_its_own_error_is_still_sigterm(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr(failures, "_SIGNALS", [])
    monkeypatch.setattr("specctl.recipes.load.list_recipes", read)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        failures.listen()
        ran = run("recipes", "ls", "--json")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ran.code == ran.json["error"]["code"] == failures.TERMINATED
    assert ran.json["error"]["what"] == "terminated"


def test_an_interrupt_is_an_object_with_json(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specctl.recipes.load.list_recipes", stop)
    ran = run("recipes", "ls", "--json")
    assert ran.code == ran.json["error"]["code"] == failures.INTERRUPTED
    assert ran.json["error"]["do"] == "specctl recipes ls --json"


def test_what_is_said_at_the_end_is_what_lies_on_the_disk(tmp_path: Path) -> None:
    from specctl.cli.app.console import Console
    from specctl.train.runs.kept import kept_in

    def stopped(folder: Path) -> tuple[int, str]:
        console = Console(io.StringIO(), errors := io.StringIO())
        console.kept = lambda: kept_in(folder)
        return failures.handle(KeyboardInterrupt(), console), errors.getvalue()

    code, told = stopped(tmp_path / "none")
    assert (code, "nothing was saved" in told) == (failures.INTERRUPTED, True)
    run = tmp_path / "families" / "medusa"
    journal = run / "data" / "answers-0123" / "answers-000.bin"
    journal.parent.mkdir(parents=True)
    journal.touch()
    assert stopped(run)[0] == failures.INTERRUPTED  # an empty journal holds no answer
    journal.write_bytes(b"SpcA")
    code, told = stopped(run)
    assert (code, f"written answers in {run}" in told) == (Exit.INTERRUPTED, True)
    (run / "run.lock").touch()
    (run / "checkpoints" / "step000007").mkdir(parents=True)
    code, told = stopped(tmp_path / "families")  # the runs inside a folder count
    assert (code, "nothing was saved" in told) == (Exit.INTERRUPTED, False)
    assert "state after step 7 in" in told
    assert "  do:       specctl" in told


def test_answers_of_regenerate_are_kept_when_it_is_stopped(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("specctl.train.data.written.regenerate.slots_for", lambda *words: 2)
    words = ["regenerate", "--prompts", "6", "--max-new-tokens", "6", "--out", str(tmp_path / "a")]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stopping(Engine.step, after=10))
        ran = run(*words)
    assert ran.code == Exit.INTERRUPTED, ran.err
    assert "nothing was saved" not in ran.err
    assert f"written answers in {tmp_path / 'a'}" in ran.err
    assert f"do:       specctl {' '.join(words)}" in ran.err
    again = run(*words)
    assert again.code == 0
    assert "of 6 prompts are answered" in again.err
    datastore = ["datastore", "--recipe", "rest", "--set", "data.regenerate=true",
                 "--set", "data.prompts=6", "--set", "data.new_tokens=6", "--out",
                 str(tmp_path / "store")]  # fmt: skip
    monkeypatch.setattr(Engine, "step", stopping(Engine.step, after=10))
    ran = run(*datastore)
    assert (ran.code, "written answers in" in ran.err) == (Exit.INTERRUPTED, True), ran.err
