"""The program: flags anywhere, one object with --json, exit codes, the error boundary."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.app import failures
from specctl.cli.app.console import Console
from specctl.cli.app.examples import fitted
from specctl.cli.main import COMMANDS, load_command, main
from specctl.core.errors import Exit, IntegrityError, SpecctlError


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `specctl recipes ls` raise."""

    def fail() -> None:
        raise error

    monkeypatch.setattr("specctl.recipes.load.list_recipes", fail)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_loads_and_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = load_command(name)
    assert command.help or name == "recipes"
    monkeypatch.setenv("COLUMNS", "60")
    below = getattr(command, "commands", {"": command})
    for word, each in below.items():
        assert main([name, *([word] if word else []), "--help", "--no-color"]) == 0
        shown = capsys.readouterr().out
        lines = re.sub(r" \\\n +", " ", shown).splitlines()  # as a shell joins them
        examples = [x for x in each.help.splitlines() if x.startswith("  specctl ")]
        assert {f" {line}" for line in examples} <= {*lines}


def test_a_long_example_goes_on_behind_a_backslash() -> None:
    text = 'Examples:\n\n  specctl x --set a=1 --y "one two" "three  four"\n\nProse of specctl.'
    assert fitted(text, 80) == text
    for width in (24, 30, 40):
        example = fitted(text, width).split("\n\n")[1]
        joined = example.replace("\\\n", "")
        assert shlex.split(joined) == shlex.split(text.split("\n\n")[1])
        assert all(len(line) <= width for line in example.splitlines())
        assert all(line.endswith(" \\") for line in example.splitlines()[:-1])


@pytest.mark.parametrize("where", ["before", "after"])
def test_global_flags_may_stand_before_or_after_the_command(where: str, run: Any) -> None:
    words = ["recipes", "ls"]
    ran = run("--json", *words) if where == "before" else run(*words, "--json")
    assert ran.code == 0
    assert ran.json["schema"] == "specctl.recipes-ls/1"


def test_json_is_one_object_with_the_promised_keys(run: Any) -> None:
    answer = run("recipes", "show", "eagle3", "--json").json
    assert set(answer) == {"schema", "ok", "result", "warnings", "next"}
    assert answer["ok"] is True
    assert answer["result"]["recipe"]["drafter"]["family"] == "eagle3"


def test_an_error_is_an_object_too(run: Any) -> None:
    ran = run("recipes", "show", "eagel3", "--json")
    assert ran.code == Exit.RECIPE
    assert ran.json["ok"] is False
    assert set(ran.json["error"]) == {"code", "what", "where", "found", "expected", "do"}
    assert ran.json["error"]["code"] == Exit.RECIPE


def test_a_usage_error_is_an_object_too(run: Any) -> None:
    ran = run("recipes", "show", "--json")
    assert ran.code == Exit.USAGE
    assert ran.json["ok"] is False
    assert "recipes show --help" in ran.json["error"]["do"]


def test_results_go_to_stdout_and_talk_to_stderr(run: Any) -> None:
    ran = run("recipes", "ls")
    assert "eagle3" in ran.out
    assert "Next:" not in ran.out
    assert "Next:" in ran.err


def test_quiet_leaves_only_results(run: Any) -> None:
    ran = run("recipes", "ls", "-q")
    assert "eagle3" in ran.out
    assert ran.err == ""


def test_what_a_library_prints_does_not_spoil_the_object(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chatty() -> list[object]:
        print("some library is noisy")
        raise SpecctlError("stop here", do="specctl recipes ls")

    monkeypatch.setattr("specctl.recipes.load.list_recipes", chatty)
    ran = run("recipes", "ls", "--json")
    assert ran.json["error"]["what"] == "stop here"
    assert "noisy" in ran.err


def test_an_error_has_four_parts(run: Any) -> None:
    ran = run("recipes", "show", "eagel3")
    assert ran.code == Exit.RECIPE
    assert ran.out == ""
    for part in ("error[3]:", "found:", "expected:", "do:"):
        assert part in ran.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IntegrityError("changed", do="again"), 7),
        (SpecctlError("stopped", do="again", exit=Exit.INTERRUPTED), 75),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 6),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 6),
        (RuntimeError("could not create a primitive"), 6),
        (RuntimeError("could not create a primitive descriptor for a matmul primitive"), 6),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 6),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 4),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x/y"), 4),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x/y"), 4),
        (ZeroDivisionError("a bug"), 1),
        (RuntimeError("shape mismatch"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_every_failure_has_its_exit_code(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    broken(monkeypatch, error)
    assert run("recipes", "ls").code == code
    answer = run("recipes", "ls", "--json")
    assert answer.code == code
    if code != failures.INTERRUPTED:
        assert answer.json["error"]["code"] == code
        assert answer.json["error"]["do"]


def test_a_bug_leaves_its_trace_in_a_file(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broken(monkeypatch, ZeroDivisionError("seven by nought"))
    ran = run("recipes", "ls")
    (trace,) = tmp_path.glob("specctl-trace-*.txt")
    assert str(trace) in ran.err
    assert "Traceback" not in ran.err
    assert "seven by nought" in trace.read_text()
    assert "Traceback" in trace.read_text()


def test_verbose_shows_the_trace_of_a_bug(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, ZeroDivisionError("seven by nought"))
    assert "Traceback" in run("recipes", "ls", "-v").err


def test_a_closed_pipe_is_quiet(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("recipes", "show", "eagle3")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(60) == failures.PIPE_CLOSED
    assert "Traceback" not in errors
    assert "Error" not in errors


def test_ctrl_c_ends_with_130(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    pipe = tmp_path / "prompts"
    os.mkfifo(pipe)
    process = start("generate", "-f", pipe)
    with pipe.open("w"):  # returns once the program reads
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == failures.INTERRUPTED
    _, errors = process.communicate()
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "do"),
    [
        (("genrate", "x"), "specctl generate --help"),
        (("recipes", "lst"), "specctl recipes ls --help"),
        (("zzzz",), "specctl --help"),
        (("generate", "--max-new-tokens", "many", "x"), "specctl generate --help"),
        (("generate", "--max-new-token", "3", "x"), "--max-new-tokens"),
        (("recipes", "cp", "eagle3"), "specctl recipes cp --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_on_the_command_line_names_what_was_meant(
    run: Any, arguments: tuple[str, ...], do: str
) -> None:
    ran = run(*arguments, "--json")
    assert ran.code == Exit.USAGE
    assert do in ran.json["error"]["do"]
    assert ran.json["error"]["expected"].startswith("specctl")


def test_version_is_one_line() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "specctl", "--version"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("specctl 0.")


def test_no_arguments_show_the_help(start: Callable[..., subprocess.Popen[str]]) -> None:
    out, _ = start().communicate(timeout=60)
    assert "Usage: specctl" in out


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.configure(json=True)
    console.say("hello")
    console.warn("careful")
    console.done({"a": 1})
    assert out.getvalue() == err.getvalue() == ""


def test_the_object_is_ascii_and_has_no_nan() -> None:
    out = io.StringIO()
    console = Console(out, io.StringIO())
    console.configure(json=True)
    console.done({"text": "\u00e9\u4e2d"})
    assert out.getvalue().isascii()
    assert json.loads(out.getvalue())["result"]["text"] == "\u00e9\u4e2d"
    with pytest.raises(ValueError, match="JSON"):
        console.done({"x": float("nan")})


def test_signals_are_not_taken_by_import() -> None:
    assert signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN)
