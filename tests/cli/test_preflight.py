"""What a run refuses before it begins, and what a pipeline no longer needs of finished stages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specctl.api.preflight import check_made_for, check_out, check_run
from specctl.core.errors import Exit, FileError
from specctl.core.storage.files import Disk
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.recipes.stages import stages_of
from specctl.train.planning import capacity as room
from specctl.train.planning.capacity import lacking_disk
from specctl.train.planning.hardware import machine_bytes
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
    assert [part.name for part in remaining(stages_of(recipe), out)] == ["two-second"]


def test_data_of_a_remaining_stage_may_not(recipe: Recipe, out: Path, tmp_path: Path) -> None:
    finish(out / "stage-1-first")
    (tmp_path / "second.txt").unlink()
    with pytest.raises(FileError, match=r"second\.txt"):
        check_run(recipe, out)
    finish(out / "stage-2-second")
    check_run(recipe, out)
    assert remaining(stages_of(recipe), out) == []


def test_a_stage_whose_package_was_lost_needs_its_data_again(recipe: Recipe, out: Path) -> None:
    first = out / "stage-1-first"
    finish(first)
    assert read_mark(first) is not None
    (first / "package").rmdir()
    assert read_mark(first) is None
    with pytest.raises(FileError, match=r"first\.txt"):
        check_run(recipe, out)


def test_a_recipe_without_stages_is_always_checked(
    recipe: Recipe, out: Path, tmp_path: Path
) -> None:
    gone = recipe.data.model_copy(update={"source": str(tmp_path / "gone.txt")})
    alone = recipe.model_copy(update={"stages": {}, "data": gone})
    finish(out / "stage-1-first")
    with pytest.raises(FileError, match=r"gone\.txt"):
        check_run(alone, out)


@pytest.mark.parametrize("command", ["train-draft", "distill", "plan", "prune", "quickstart"])
def test_a_folder_with_files_of_others_is_no_place_for_a_run(
    run: Any, tmp_path: Path, command: str
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "run.yaml").write_text("of: another program")
    ran = run(command, "--out", tmp_path, "--json")
    assert ran.code == Exit.FILE
    assert ran.json["error"]["where"] == "--out"
    assert "notes.txt" in ran.json["error"]["found"]
    assert len([*tmp_path.iterdir()]) == 2


def test_a_folder_of_a_run_may_hold_more_and_an_empty_one_what_systems_leave(
    tmp_path: Path,
) -> None:
    check_out(tmp_path / "absent")
    (tmp_path / ".gitkeep").touch()
    check_out(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileError):
        check_out(tmp_path)
    (tmp_path / "run.lock").touch()
    check_out(tmp_path)


class Small(Disk):
    """A disk with little room."""

    def free(self, folder: Path) -> int:
        return 1000


WORDS = ("--recipe", "medusa", "--set", "train.steps=40")


@pytest.mark.parametrize("command", [("plan",), ("train-draft", "--dry-run")])
def test_a_plan_without_room_on_the_disk_is_shown_and_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    assert run(*command, *WORDS, "--out", tmp_path / "new", "--json").json["result"]["fits"]
    monkeypatch.setattr(room, "Disk", Small)
    ran = run(*command, *WORDS, "--out", tmp_path / "new", "--json")
    assert ran.code == ran.json["error"]["code"] == Exit.RESOURCES
    assert ran.json["result"]["plan"]["steps"] == 40
    assert not ran.json["result"]["fits"]
    (lack,) = ran.json["result"]["lacks"]
    assert lack["have_bytes"] == 1000
    assert lack["need_bytes"] == ran.json["result"]["plan"]["disk_bytes"]
    shown = run(*command, *WORDS, "--out", tmp_path / "new")
    assert "40" in shown.out
    assert "does not fit here" in shown.err


def test_a_plan_that_needs_more_memory_than_there_is_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "machine_bytes", lambda: 10**8)
    ran = run("plan", *WORDS, "--out", tmp_path / "new", "--json")
    assert ran.code == Exit.RESOURCES
    assert [lack["what"] for lack in ran.json["result"]["lacks"]] == ["memory of this machine"]


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path) -> None:
    whole = machine_bytes(())
    assert whole is not None
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "less").write_text("123456\n")
    assert machine_bytes([str(tmp_path / "max"), str(tmp_path / "absent")]) == whole
    assert machine_bytes([str(tmp_path / "max"), str(tmp_path / "less")]) == 123456


def test_what_a_run_has_written_before_needs_no_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "Disk", Small)
    needs = [(tmp_path, {"data": 900, "checkpoints": 800, "while saving": 300})]
    (lack,) = lacking_disk(needs)
    assert (lack.need, lack.have) == (2000, 1000)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_bytes(bytes(1000))
    (lack,) = lacking_disk(needs)
    assert lack.need == 1100  # more than was planned is no room for something else
    (tmp_path / "checkpoints").write_bytes(bytes(100))
    assert lacking_disk(needs) == []


def test_as_many_features_are_proposed_as_the_disk_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Free(Disk):
        def free(self, folder: Path) -> int:
            return 950_000_000

    monkeypatch.setattr(room, "Disk", Free)
    needs = {"data": 300_000_000, "features": 10**9}
    (lack,) = lacking_disk([(tmp_path, needs)])
    assert lack.do.endswith("--set data.features_gb=0.6")
    assert lacking_disk([(tmp_path, {**needs, "features": 600_000_000})]) == []
    (lack,) = lacking_disk([(tmp_path, {**needs, "data": 10**9})])
    assert "features_gb" not in lack.do


def test_a_demonstration_on_another_target_is_said_whatever_its_size(tmp_path: Path) -> None:
    from specctl.recipes.targets import resolve

    said: list[str] = []
    check_made_for(load_recipe("eagle3"), "eagle3", said.append)
    assert not said
    other = tmp_path / "other"
    shutil.copytree(str(resolve("tiny").path), other)
    check_made_for(load_recipe("eagle3", target=str(other)), "eagle3", said.append)
    assert len(said) == 1
    assert f"made for the target tiny, not for {other}: a demonstration (160 steps" in said[0]
    assert "2,048 of 6,144 ids" in said[0]
