"""benchmarks/task_accuracy.py: the number that an answer says, the kept answers, paired shares."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("task_accuracy")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("5 bags of $18.00 each. It costs **$1,000.00**.", 1000),
        (r"So it is \(385{,}000\) dollars.", 385000),
        (r"\[ \boxed{15\text{ minutes}} \] in 2 steps", 15),
        (r"\boxed{7} or rather \boxed{\frac{1}{2}}", 2),
        ("The volume is 40 cm^3", 40),
        ("10-4 = 6", 6),
        ("between 3-5", 5),
        ("It fell to -4 degrees.", -4),
        ("half: .5", 0.5),
        ("50%", 50),
        ("CO2 and v2.1", None),
        ("none", None),
    ],
)
def test_the_last_number_of_an_answer(
    accuracy: ModuleType, answer: str, number: float | None
) -> None:
    assert accuracy.number_in(answer) == number
    assert accuracy.says(number if number is not None else 2.0, answer) == (number is not None)
    assert not accuracy.says(1.25, answer)


def test_every_kept_answer_is_what_its_working_gives(accuracy: ModuleType) -> None:
    answers = json.loads((BENCHMARKS / "answers" / "spec_bench_math.json").read_text())
    assert len(answers) == 20
    for one in answers.values():
        assert set(one["working"]) <= set("0123456789+-*/(). ")
        assert eval(one["working"]) == pytest.approx(one["answer"])
    checks = accuracy.sums(["1 + 1?", "2 + 2?"], {accuracy.digest("2 + 2?"): {"answer": 4}})
    assert {text: check("so 4") for text, check in checks.items()} == {"2 + 2?": True}


def test_shares_are_compared_over_the_same_questions(accuracy: ModuleType) -> None:
    found = [
        accuracy.Found(question, way, is_right, 2.0, 3.0, 9, "eos", None)
        for way, right in (("lossless", (1, 1, 0, 0, 1)), ("other", (1, 0, 1, 0)))
        for question, is_right in zip("abcde", map(bool, right), strict=False)
    ]
    whole, other = accuracy.table(["lossless", "other"], found).splitlines()[2:]
    assert "2 of 4 (0.50 +- 0.25) | 0 right, 0 wrong | +0.00 +- 0.00 | 2.00 | 3.0 s" in whole
    assert "2 of 4 (0.50 +- 0.25) | 1 right, 1 wrong | +0.00 +- 0.41 |" in other
