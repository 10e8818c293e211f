"""Answers that the target wrote before are learned as they are; those of another one are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import prepare, write_answers_alone
from specctl.train.data.rows.rows import TokenData
from specctl.train.data.written.answers_file import write_answers
from specctl_testing.train import small_runs
from specctl_testing.train.of_recipe import preparation_of
from specctl_testing.train.small_runs import Talk, run


class Console(Talk):
    """Keeps what was warned of, too."""

    @contextmanager
    def task(self, name: str, *given: Any) -> Iterator[Any]:
        self.said.append(f"task {name}: {given[0]}")
        yield lambda *_: None


@pytest.fixture(scope="module")
def target() -> Target:
    return small_runs.random_target(seed=0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "prompts.jsonl"
    words = [f"def name_{i}(value):\n    return value + {i} * {i % 7}\n" for i in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return path


def recipe_of(*sources: Path, **sets: Any) -> Recipe:
    fields = small_runs.SMALL | {
        "data.source": json.dumps([str(file) for file in sources]), "data.format": "auto",
        "data.prompts": 20,
    }  # fmt: skip
    fields |= {key.replace("__", "."): value for key, value in sets.items()}
    return load_recipe("medusa", sets=[f"{key}={value}" for key, value in fields.items()])


@pytest.fixture(scope="module")
def answers(target: Target, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers")
    written = write_answers_alone(preparation_of(recipe_of(texts), target), out, Talk())
    write_answers(out / "answers.jsonl", written, target)
    return out / "answers.jsonl"


def learned(data: TokenData) -> list[list[int]]:
    return sorted(ids.tolist() for ids, _ in data.answers())


def test_its_own_answers_are_learned_as_they_are(
    tmp_path: Path, target: Target, texts: Path, answers: Path
) -> None:
    console = Console()
    data = prepare(recipe_of(answers), target, tmp_path / "a", console)
    assert "data: 20 answers of target" in " ".join(console.said)
    assert not any("writes answers" in line for line in console.said)
    assert not list((tmp_path / "a").glob("data/answers-*"))
    assert (data.manifest.writer, data.manifest.answered) == ("target", 20)
    assert learned(data) == learned(prepare(recipe_of(texts), target, tmp_path / "b"))
    more = prepare(recipe_of(answers, data__prompts=5), target, tmp_path / "c")
    assert more.manifest.answered == 20, "none that is written is left out"


def test_prompts_beside_them_are_answered_up_to_the_number_that_is_wanted(
    tmp_path: Path, target: Target, texts: Path, answers: Path
) -> None:
    console = Console()
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"class C{i}:\n    x = {i}\n"}) + "\n"
                             for i in range(40)))  # fmt: skip
    data = prepare(recipe_of(answers, other, data__prompts=30), target, tmp_path / "run", console)
    assert "task the target writes answers: 10" in console.said
    assert data.manifest.answered == data.manifest.documents == 30


def test_answers_of_another_target_are_named_and_written_anew(
    tmp_path: Path, target: Target, answers: Path
) -> None:
    other, console = small_runs.random_target(seed=1), Console()
    data = prepare(recipe_of(answers), other, tmp_path / "run", console)
    assert "task the target writes answers: 20" in console.said
    (warning,) = [line for line in console.warnings if "of target" in line]
    assert target.fingerprint[:12] in warning
    assert "their prompts are answered anew" in warning
    assert learned(data) != learned(prepare(recipe_of(answers), target, tmp_path / "own"))
    taken = recipe_of(answers, data__regenerate="false")
    prepare(taken, other, tmp_path / "taken", console)
    assert "learned as they are" in console.warnings[-1]


def test_a_run_goes_on_with_answers_that_were_written_elsewhere(
    tmp_path: Path, target: Target, texts: Path, answers: Path
) -> None:
    out = tmp_path / "run"
    run(recipe_of(answers), out, target)
    ran = run(
        recipe_of(answers, texts, data__prompts=40, train__steps=16), out, target, allow=["data"]
    )
    data = TokenData.open(out / "data")
    assert data.manifest.answered == 40
    assert "20 more to write" in " ".join(ran.said)
    assert len({tuple(ids) for ids in learned(data)}) == 20  # of the first part alone
