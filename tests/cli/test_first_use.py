"""What someone meets who tries specctl for the first time: no arguments, a folder for a file, a
recipe where none is asked for, an empty place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.main import COMMANDS, main


@pytest.mark.parametrize("words", [(), ("recipes",), ("runs",)])
def test_a_group_without_a_command_shows_its_help_and_no_empty_error(
    words: tuple[str, ...], run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = run(*words)
    out, _ = capfd.readouterr()
    assert ran.code == 2
    assert "Usage: specctl" in out
    assert "error" not in ran.err


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_help_names_no_type_beside_a_switch(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main([*([name] if name else []), "--help"]) == 0
    out, _ = capfd.readouterr()
    assert "bool" not in out.lower()
    assert "--json " in out


def test_the_word_too_many_may_be_a_recipe(run: Any) -> None:
    error = run("plan", "eagle3", "--json").json["error"]
    assert error["code"] == 2
    assert "--recipe eagle3" in error["do"]
    assert "--recipe" not in run("plan", "eagle4", "--json").json["error"]["do"]


def test_the_name_of_a_recipe_or_a_command_to_explain_is_understood(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = {
        ("eagle3",): "specctl train-draft --recipe eagle3",
        ("prompt-lookup",): 'specctl generate --draft prompt-lookup "TEXT"',
        ("help", "train-draft"): "specctl train-draft --help",
        ("help", "eagle3"): "specctl --help",
        ("nonsense",): "specctl --help",
    }
    for words, do in meant.items():
        monkeypatch.setattr("sys.argv", ["specctl", *words])
        error = run(*words, "--json").json["error"]
        assert (error["code"], error["do"]) == (2, do), words


def test_where_nothing_was_trained_there_are_no_runs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run("runs", "ls", "--json")
    assert (ran.code, ran.json["result"]) == (0, {"runs": []})
    assert run("runs", "ls", "elsewhere").code == 4
    (tmp_path / "runs").mkdir()
    told = run("runs", "clean")
    assert told.code == 0
    assert "nothing to delete" in told.err
    assert "would go" not in told.out


def test_a_folder_is_no_file_of_prompts_and_no_recipe(run: Any, tmp_path: Path) -> None:
    error = run("generate", "-f", tmp_path, "--json").json["error"]
    assert (error["code"], error["found"]) == (4, "a folder")
    error = run("recipes", "show", tmp_path, "--json").json["error"]
    assert error["code"] == 4
    assert "run.yaml" in error["found"]


def test_a_prompt_that_is_no_text_is_laid_to_where_it_came_from(run: Any, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    error = run("generate", "-f", tmp_path / "latin.txt", "--json").json["error"]
    assert "iconv -f latin1 -t utf-8" in error["do"]
    assert (
        run("generate", "-", "--json", stdin="\udce9\n").json["error"]["where"] == "standard input"
    )


def test_closed_streams_end_in_no_bug(tmp_path: Path) -> None:
    script = f"exec {sys.executable} -m specctl recipes ls >&- 2>&-"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    assert subprocess.run(["sh", "-c", script], env=env, check=False).returncode == 0
    assert list(tmp_path.glob("specctl-trace-*")) == []
