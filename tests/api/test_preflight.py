"""A pipeline goes on without what its finished stages read: their data and their drafters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.api.preflight import check_run
from specctl.core.errors import FileError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.train.runs.finished import MARK, read_mark, remaining, stage_folders

TWO = """
name: two
data: {format: text, regenerate: false}
stages:
  first: {data: {source: FIRST}, drafter: {init: ./gone}}
  second: {data: {source: SECOND}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    second = tmp_path / "second.txt"
    second.write_text("some words\n")
    text = TWO.replace("FIRST", str(tmp_path / "first.txt")).replace("SECOND", str(second))
    (tmp_path / "two.yaml").write_text(text)
    return load_recipe(str(tmp_path / "two.yaml"))


@pytest.fixture
def out(recipe: Recipe, tmp_path: Path) -> Path:
    for folder in stage_folders(recipe.stages, tmp_path / "run").values():
        (folder / "package").mkdir(parents=True)
    return tmp_path / "run"


def finish(folder: Path) -> None:
    (folder / MARK).write_text(json.dumps({"package": str(folder / "package")}))


def test_data_that_only_a_finished_stage_read_may_be_gone(recipe: Recipe, out: Path) -> None:
    with pytest.raises(FileError, match=r"first\.txt"):
        check_run(recipe, out)
    finish(out / "stage-1-first")
    check_run(recipe, out)
    assert [part.name for part in remaining(recipe, out)] == ["two-second"]


def test_data_of_a_remaining_stage_may_not(recipe: Recipe, out: Path, tmp_path: Path) -> None:
    finish(out / "stage-1-first")
    (tmp_path / "second.txt").unlink()
    with pytest.raises(FileError, match=r"second\.txt"):
        check_run(recipe, out)
    finish(out / "stage-2-second")
    check_run(recipe, out)
    assert remaining(recipe, out) == []


def test_a_stage_whose_package_was_lost_needs_its_data_again(recipe: Recipe, out: Path) -> None:
    first = out / "stage-1-first"
    finish(first)
    assert read_mark(first) is not None
    (first / "package").rmdir()
    assert read_mark(first) is None
    with pytest.raises(FileError, match=r"first\.txt"):
        check_run(recipe, out)


def test_a_recipe_without_stages_is_always_checked(recipe: Recipe, out: Path) -> None:
    alone = recipe.model_copy(update={"stages": {}})
    finish(out / "stage-1-first")
    assert remaining(alone, out) == [alone]
