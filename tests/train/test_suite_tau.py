"""Tau on a public suite while training: beside the held-out one, deciding nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.api.preflight import check_run
from specctl.api.train import TrainResult
from specctl.core.errors import FileError, RecipeError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.suite_prompts import num_in_suite, read_run_suite, suite_prompts
from specctl.train.data.records.records import Sample
from specctl.train.metrics.metrics import read_log
from specctl.train.metrics.plot import save_learning_curve
from specctl.train.runs.finished import read_mark
from specctl_testing.train import small_runs
from specctl_testing.train.small_runs import random_target, small_recipe

QUESTIONS = {
    "qa": ["What is a list?", "What is a tuple?", "What is a set?", "What is a dict?"],
    "maths": ["How much is 1 + 1?", "How much is 2 + 2?"],
    "long": ["word " * 300],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(seed=0)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suite") / "question.jsonl"
    records = ({"category": k, "turns": [q, "And?"]} for k, of in QUESTIONS.items() for q in of)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"spec-bench={path.parent}"


def recipe_of(folder: Path, **sets: object) -> Recipe:
    path = folder / "words.jsonl"
    lines = [f"def name_{i}(value):\n    return value + {i} * {i % 7}\n" for i in range(60)]
    lines += ["what is a  LIST?\n", "How much is 3 + 3?"]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    own = {
        "train__tau_every": 4,
        "train__tau_prompts": 6,
        "data__format": "auto",
        "data__regenerate": "false",
    }
    return small_recipe("medusa", path, **own | sets)


def test_a_run_measures_both_and_the_suite_changes_nothing(
    tmp_path: Path, target: Target, suite: str
) -> None:
    plain = small_runs.run(recipe_of(tmp_path), tmp_path / "plain", target)
    out = tmp_path / "both"
    recipe = recipe_of(tmp_path, train__tau_suite=suite)
    both = small_runs.run(recipe, out, target)
    assert (both.digest, both.result.tau) == (plain.digest, plain.result.tau)
    assert both.result.best_checkpoint.name == plain.result.best_checkpoint.name
    said = [line for line in both.said if "measured tau" in line]
    lines = [line for line in read_log(out / "metrics.jsonl") if "tau" in line]
    assert [line["step"] for line in lines] == [4, 8]
    for text, line in zip(said, lines, strict=True):
        assert line["suite"] == "spec-bench"
        assert f"{line['tau']:.3f} held out, {line['suite_tau']:.3f} on spec-bench (" in text
    best = next(line for line in lines if line["tau"] == both.result.tau)
    found = both.result.suite
    assert (found["name"], found["tau"], found["prompts"]) == ("spec-bench", best["suite_tau"], 4)
    (out / "package").mkdir()  # which nobody wrote
    assert read_mark(out)["suite"] == found
    assert small_runs.run(recipe, out, target).result.suite == found
    assert TrainResult(recipe, both.result).on_suite() == f", {found['tau']:.2f} on spec-bench"
    assert any("4 questions of spec-bench, 2 categories; 1 left out" in text for text in both.said)
    assert any("1 record with a question of spec-bench" in text for text in both.warned)
    without = recipe_of(tmp_path)  # it decides nothing that is learned, so a run may drop it
    assert small_runs.run(without, out, target).digest == ""


def test_the_curve_has_the_suite_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[str] = []
    kept = figures.Figure.savefig

    def savefig(figure: object, *words: object, **names: object) -> None:
        drawn.extend(t.get_text() for t in figure.axes[-1].get_legend().get_texts())
        kept(figure, *words, **names)

    monkeypatch.setattr(figures.Figure, "savefig", savefig)
    log = tmp_path / "metrics.jsonl"
    log.write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "tau": 1.5, "suite": "mine", "suite_tau": 1.2}\n'
    )
    save_learning_curve(log, tmp_path / "curve.png")
    assert drawn == ["measured on held-out prompts", "measured on mine"]


def test_every_category_has_as_many_questions(target: Target, suite: str) -> None:
    train = load_recipe("eagle3", ["train.tau_prompts=6", f"train.tau_suite={suite}"]).train
    found = suite_prompts(train, target)
    texts = [target.decode(ids) for ids in found.prompts]
    assert texts == ["What is a list?", "What is a set?", *QUESTIONS["maths"]]
    one = suite_prompts(train.model_copy(update={"tau_prompts": 1}), target)
    assert len(one.prompts) == 2  # at least one of each that fits
    few = train.model_copy(update={"tau_tokens": 127})
    with pytest.raises(RecipeError, match="no question of suite spec-bench fits"):
        suite_prompts(few, target)


def test_questions_in_the_data_are_counted_however_they_are_written(suite: str) -> None:
    def said(*turns: str) -> Sample:
        return Sample("x", "d", messages=tuple({"role": "user", "content": t} for t in turns))

    samples = [
        said("hello", "what is\na list?"), said("What is a list? Really?"), said("And?"),
        Sample("x", "d", text="HOW MUCH is 2 + 2?\n"),
        Sample("x", "d", messages=({"role": "assistant", "content": "What is a set?"},)),
    ]  # fmt: skip
    assert num_in_suite(samples, read_run_suite(suite)) == 2


def test_a_suite_that_cannot_be_read_is_refused_before_the_run(tmp_path: Path) -> None:
    def refused(word: str) -> FileError | RecipeError:
        with pytest.raises((FileError, RecipeError)) as caught:
            check_run(recipe_of(tmp_path, train__tau_suite=word), tmp_path / "run")
        assert caught.value.where == f"train.tau_suite: {word}"
        return caught.value

    assert "--set train.tau_suite=spec-bench=question.jsonl" in refused("spec-bench").do
    assert "are not there" in refused(f"mine={tmp_path / 'none'}").what
    assert "--set train.tau_suite=spec-bench" in refused("spec-benhc").do
    assert not (tmp_path / "run").exists()
    warned: list[str] = []
    gone = recipe_of(tmp_path, train__tau_suite=f"mine={tmp_path / 'none'}")
    check_run(gone, tmp_path / "run", warned.append)
    assert "the run will need it" in warned[0]
    elsewhere = ["train.tau_suite=x", "data.target_source=files", "data.states=y"]
    with pytest.raises(RecipeError, match=r"ignored with data.target_source files"):
        load_recipe("eagle3", [*elsewhere, "data.regenerate=false"])
