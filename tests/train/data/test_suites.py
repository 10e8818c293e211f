"""Public question sets are read as their files are laid out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import FileError, NetworkError, RecipeError
from specctl.train.data.prompts import suites
from specctl.train.data.prompts.suites import SUITES, WITHHELD, evenly, read_suite


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def said(turns: Any) -> list[list[str]]:
    return [[message["content"] for message in turn] for turn in turns]


def test_spec_bench_joins_what_is_of_mt_bench_and_keeps_turns_apart(tmp_path: Path) -> None:
    file = write(
        tmp_path / "data" / "spec_bench" / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["a?", "b?"], "reference": ["x", "y"]},
        {"question_id": 241, "category": "qa", "turns": ["c?"]},
    )
    write(tmp_path / "data" / "spec_bench" / "model_answer" / "x.jsonl", {"choices": []})
    for place in (file, tmp_path, file.parent):
        suite = read_suite(f"spec-bench={place}")
        assert [one.category for one in suite.questions] == ["mt_bench", "qa"]
        assert said(suite.questions[0].turns) == [["a?"], ["b?"]]
        assert suite.questions[1].text == "c?"


def test_mt_bench_of_the_hub_has_its_turns_under_prompt(tmp_path: Path) -> None:
    record = {"category": "stem", "prompt": ["a?", "b?"], "reference": [], "prompt_id": 3}
    [one] = read_suite(f"mt-bench={write(tmp_path / 'm.jsonl', record)}").questions
    assert (one.category, said(one.turns)) == ("stem", [["a?"], ["b?"]])


def test_humaneval_is_a_request_to_a_chat_model_and_code_to_a_base_model(tmp_path: Path) -> None:
    code = 'def f():\n    """One."""\n'
    record = {"task_id": "HumanEval/0", "prompt": code, "canonical_solution": "    return 1\n",
              "test": "assert f() == 1", "entry_point": "f"}  # fmt: skip
    [one] = read_suite(f"humaneval={write(tmp_path / 'HumanEval.jsonl', record)}").questions
    assert one.text == code
    assert one.category == "coding"
    [[request]] = said(one.turns)
    assert request.startswith("Complete this Python function.\n\n```python\ndef f():")
    assert "return 1" not in request


def test_gsm8k_and_alpaca_are_asked_without_their_answers(tmp_path: Path) -> None:
    sums = write(tmp_path / "test.jsonl", {"question": "2+2?", "answer": "4 #### 4"})
    [one] = read_suite(f"gsm8k={sums.parent}").questions
    assert (one.category, said(one.turns)) == ("math", [["2+2?"]])
    path = write(tmp_path / "a" / "a.jsonl", {"instruction": "Say", "input": "", "output": "x"})
    [one] = read_suite(f"alpaca={path}").questions
    assert (one.category, said(one.turns)) == ("instructions", [["Say"]])


def test_a_downloaded_data_set_of_the_hub_is_read_by_its_part_and_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "main" / f"{split}-00000.jsonl", {"question": split, "answer": "4"})
    [one] = read_suite(f"gsm8k={tmp_path}").questions
    assert one.text == "test"


def test_what_speed_bench_may_not_ship_is_left_out_and_counted(tmp_path: Path) -> None:
    whole = {"question_id": "1", "category": "rag", "turns": ["a?", "b?"], "source": "s",
             "src_id": "1", "difficulty": None, "multiturn": True}  # fmt: skip
    held = {**whole, "turns": [f"{WITHHELD} FROM THE SOURCE"]}
    suite = read_suite(f"speed-bench={write(tmp_path / 's.jsonl', held, whole)}")
    assert (suite.withheld, len(suite.questions)) == (1, 1)
    with pytest.raises(FileError, match="text is not shipped"):
        read_suite(f"speed-bench={write(tmp_path / 't.jsonl', held)}")


def test_conversations_wait_for_their_last_answer(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]  # fmt: skip
    file = write(tmp_path / "own.jsonl", {"category": "x", "messages": talk})
    suite = read_suite(str(file))
    assert suite.name == "own"
    assert said(suite.questions[0].turns) == [["s", "a", "b", "c"]]


def test_a_limit_takes_of_every_category_at_even_distances(tmp_path: Path) -> None:
    records = [{"category": name, "turns": [f"{name}{i}"]} for i in range(8) for name in "ab"]
    questions = read_suite(f"spec-bench={write(tmp_path / 'q.jsonl', *records)}").questions
    assert [one.text for one in evenly(questions, 2)] == ["a0", "a4", "b0", "b4"]
    assert len(evenly(questions, 99)) == len(evenly(questions, None)) == 16


def test_the_hub_is_asked_for_the_named_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def rows(name: str, split: str) -> list[Any]:
        asked.append((name, split))
        return [{"turns": ["a?"], "category": "x", "prompt": None}]

    monkeypatch.setattr(suites, "hub_rows", rows)
    read_suite("speed-bench")
    read_suite("speed-bench:throughput_8k")
    read_suite("mt-bench")
    assert asked == [
        ("nvidia/SPEED-Bench:qualitative", "test"),
        ("nvidia/SPEED-Bench:throughput_8k", "test"),
        ("HuggingFaceH4/mt_bench_prompts", "train"),
    ]


def test_a_hub_that_is_not_reached_leads_to_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(name: str, split: str) -> Any:
        raise NetworkError(
            "cannot load the hub data set", found="no route", do="data.source=corpus"
        )

    monkeypatch.setattr(suites, "hub_rows", rows)
    with pytest.raises(NetworkError, match="--suite speed-bench=FILE") as caught:
        read_suite("speed-bench:throughput_8k")
    assert "no route" in str(caught.value.found)


def test_a_suite_that_is_nowhere_is_refused_with_a_working_step(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--suite humaneval"):
        read_suite("humanevall")
    with pytest.raises(RecipeError, match=r"question\.jsonl"):
        read_suite("spec-bench")
    with pytest.raises(FileError):
        read_suite(f"gsm8k={tmp_path / 'none.jsonl'}")
    with pytest.raises(FileError, match=r"bad.jsonl:1"):
        read_suite(f"gsm8k={write(tmp_path / 'bad.jsonl', {'turns': 3})}")
    assert set(SUITES) == {
        "everyday", "spec-bench", "mt-bench", "humaneval", "gsm8k", "alpaca", "speed-bench"
    }  # fmt: skip


def test_the_questions_that_ship_are_three_of_each_of_six_kinds() -> None:
    found = read_suite("everyday")
    kinds = Counter(one.category for one in found.questions)
    assert kinds == dict.fromkeys(("writing", "facts", "maths", "code", "summary", "editing"), 3)
    assert len({one.text for one in found.questions}) == 18
    assert not found.withheld
