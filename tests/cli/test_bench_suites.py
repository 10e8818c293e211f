"""`specctl bench --suite`: by category, turn by turn, as table, JSON and card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.app import failures
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import Exit
from specctl.runtime.target.target import Target
from specctl_testing.cli.ran import Ran, Run
from specctl_testing.runtime.chat_targets import spoken_with

SHORT = ("--max-new-tokens", 6, "--repeats", 1, "--temperature", 0, "--no-adaptive")


@pytest.fixture
def load(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> Any:
    """load(target): what every command loads from now on."""

    def use(target: Target) -> None:
        monkeypatch.setattr(TargetChoice, "load", lambda *args, **more: target)

    return use


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    records = [
        {"category": "writing", "turns": ["Write a loop.", "Shorter."]},
        {"category": "writing", "turns": ["Write a class.", "Longer."]},
        {"category": "qa", "turns": ["What is a list?"]},
        {"category": "rag", "turns": ["x = 1\n" * 5000]},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def bench(run: Run, questions: Path, *more: object) -> Ran:
    return run("bench", "prompt-lookup", "--suite", f"spec-bench={questions}", *SHORT, *more)


def test_a_suite_is_measured_by_category(
    load: Any, tiny_target: Target, questions: Path, run: Run, tmp_path: Path
) -> None:
    load(spoken_with(tiny_target))
    card = tmp_path / "cards" / "bench.md"
    ran = bench(run, questions, "--json", "--card", card)
    assert ran.code == 0, ran.err
    result = ran.json["result"]
    assert (result["suites"], result["chat"]) == (["spec-bench"], True)
    assert result["categories"] == {"mt_bench": 2, "qa": 1}
    assert any("1 question left out, longer than the context" in one for one in result["notes"])
    plain, copy = result["rows"]
    assert [one["category"] for one in copy["by_category"]] == ["mt_bench", "qa"]
    assert copy["tau"] >= 1.0
    assert copy["tau_error"] >= 0.0
    assert plain["speedup_error"] is None
    assert copy["identical_to_plain"] is True
    assert (
        sum(one["rounds"] for one in plain["by_context"]) == 5 * 6
    )  # two turns of two, one of one
    text = card.read_text()
    assert "--suite" in text
    assert "| drafter | sampling | tau |" in text
    made = result["made"]
    assert made["command"][0] == "specctl"
    assert made["machine"]["chip"] in text
    assert made["date"] in text
    assert "## Speed-up (tau) by category, greedy" in text
    assert "## tau by tokens in the context" in text


def test_the_tables_of_a_suite_are_shown(
    load: Any, tiny_target: Target, questions: Path, run: Run
) -> None:
    load(spoken_with(tiny_target))
    ran = bench(run, questions, "--limit", 1)
    assert "mt_bench (1)" in ran.out
    assert "as turns of a chat" in ran.out
    assert "2 of 4 questions" not in ran.out
    assert "spec-bench: 3 of 4 questions (at most 1 of each category, at even distances)" in ran.out


def test_a_base_model_continues_the_first_question_and_says_so(
    load: Any, tiny_target: Target, questions: Path, run: Run
) -> None:
    load(tiny_target)
    ran = bench(run, questions, "--json", "--domain", "mt_bench")
    result = ran.json["result"]
    assert result["chat"] is False
    assert result["categories"] == {"mt_bench": 2}
    assert any("only the first question" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--suite", "humaneval", "--num-prompts", 3), "give --limit"),
        (("--limit", 3), "give --num-prompts"),
        (("--suite", "gsm8k", "--prompts", "x.txt"), "a suite and prompts"),
        (("--suite", "specbench"), "--suite spec-bench"),
    ],
)
def test_flags_that_say_nothing_are_refused(
    load: Any, tiny_target: Target, run: Run, flags: tuple[object, ...], words: str
) -> None:
    load(tiny_target)
    ran = run("bench", "prompt-lookup", *flags)
    assert ran.code in (Exit.RECIPE, Exit.USAGE)
    assert words in ran.err


def test_plain_prompts_are_measured_as_before(load: Any, tiny_target: Target, run: Run) -> None:
    load(tiny_target)
    ran = run("bench", "prompt-lookup", "--num-prompts", 2, *SHORT, "--json")
    result = ran.json["result"]
    assert (result["suites"], result["chat"], result["num_prompts"]) == ([], False, 2)
    assert result["categories"] == {"": 2}


def test_a_stopped_benchmark_shows_what_it_had_measured(
    load: Any, tiny_target: Target, questions: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specctl.runtime.measure import bench as measure

    whole, answered = measure.conversations, list[str]()

    def stopped(target: Any, contender: Any, group: Any, *more: Any) -> Any:
        if group[0].category == "qa":
            raise KeyboardInterrupt
        answered.append(contender.name)
        return whole(target, contender, group, *more)

    load(spoken_with(tiny_target))
    monkeypatch.setattr(measure, "conversations", stopped)
    ran = bench(run, questions)
    assert (ran.code, answered) == (failures.INTERRUPTED, ["plain", "prompt-lookup"])
    assert "above: what was measured, of 2 questions" in ran.err
    assert "prompt-lookup  greedy" in ran.out
    ran = bench(run, questions, "--json")
    assert ran.json["error"]["what"] == "interrupted"
    assert "in the result: what was measured" in ran.json["error"]["found"]
    assert (ran.json["result"]["stopped"], ran.json["result"]["categories"]) == (
        True,
        {"mt_bench": 2},
    )


def test_a_benchmark_that_is_stopped_in_its_second_setting_shows_both(
    load: Any, tiny_target: Target, questions: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specctl.runtime.measure import bench as measure

    whole = measure.conversations

    def stopped(target: Any, contender: Any, group: Any, sampling: Any, *more: Any) -> Any:
        if group[0].category == "qa" and sampling.temperature:
            raise KeyboardInterrupt
        return whole(target, contender, group, sampling, *more)

    load(spoken_with(tiny_target))
    monkeypatch.setattr(measure, "conversations", stopped)
    ran = bench(run, questions, "--temperature", 1)
    assert ran.code == failures.INTERRUPTED
    *_, whole_table, part = ran.out.split("Speed-up (tau) by category, ")
    assert ["-" in line.split() for line in whole_table.splitlines()[3:5]] == [False, False]
    assert [line.split()[-1] for line in part.splitlines()[3:5]] == ["-", "-"]


def test_questions_that_are_not_there_are_named_by_the_flag(
    load: Any, tiny_target: Target, questions: Path, run: Run
) -> None:
    load(spoken_with(tiny_target))
    ran = bench(run, questions.with_name("questions.jsonl"))
    assert ran.code == Exit.FILE
    assert "where:    --suite" in ran.err
    assert "did you mean question.jsonl?" in ran.err
