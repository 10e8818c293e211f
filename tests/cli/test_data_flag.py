"""--data, as often as it is given: in the plan, in the answers, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

WORDS = ("--target", "tiny", "--recipe", "distill")


def sources(folder: Path) -> list[str]:
    names = []
    for name in ("a", "b"):
        names.append(str(folder / f"{name}.jsonl"))
        lines = (f'{{"prompt": "question {name}{i}?"}}\n' for i in range(4))
        Path(names[-1]).write_text("".join(lines))
    return names


def test_the_plan_shows_every_source_with_its_share(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [Path(name).name for name in sources(tmp_path)]
    flags = [word for name in names for word in ("--data", name)]
    rows = run("plan", *WORDS, *flags).out.splitlines()
    assert all(any(name in row and "50%" in row for row in rows) for name in names)
    found = run("plan", *WORDS, *flags, "--json").json["result"]["plan"]
    assert [(one["name"], one["share"]) for one in found["data"]] == [(name, 0.5) for name in names]


def test_every_source_is_answered(run: Any, tmp_path: Path) -> None:
    flags = [word for name in sources(tmp_path) for word in ("--data", name)]
    out = tmp_path / "r"
    ran = run("regenerate", *WORDS, *flags, "--prompts", 8, "--max-new-tokens", 2, "--out", out)
    answers = (out / "answers.jsonl").read_text()
    assert (answers.count("question a"), answers.count("question b")) == (4, 4)
    assert ran.err.count("4 records (50% of all), 4 of them taken as prompts") == 2


def test_a_flag_of_one_value_that_is_given_twice_is_remarked(run: Any) -> None:
    ran = run("generate", "--max-new-tokens", "2", "--max-new-tokens", "1", "def", "--json")
    assert any("--max-new-tokens is given 2 times" in text for text in ran.json["warnings"])
    once = run("generate", "--max-new-tokens", "1", "def", "--stop", "a", "--stop", "b", "--json")
    assert not any("times" in text for text in once.json["warnings"])
