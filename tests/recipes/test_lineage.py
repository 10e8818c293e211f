"""Recipes that are based on others: what they take over, and what a wrong parent says."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.api.arguments.recipe import recipe_of
from specctl.cli.main import main
from specctl.core.errors import RecipeError
from specctl.recipes.files import base_names, recipe_names
from specctl.recipes.lineage import lineage
from specctl.recipes.load import list_recipes, load_recipe
from specctl.recipes.made_for import advice
from specctl.recipes.notes import notes_of_recipe
from specctl.recipes.whole import whole_text

PARENT = """name: parent
summary: about the parent
paper: P
drafter: {family: medusa, options: {num_heads: 3, decay: 0.5}, init: target}
train:
  steps: 5  # eagle: why five
  rows: 4  # ours: why four
  lora: {rank: 8}
data:
  drop: [a, b]
serve: {nodes: 9, policy: direct}
"""


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def problem(folder: Path, name: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(folder / f"{name}.yaml"))
    return caught.value


def test_a_childs_fields_lie_over_its_parents(tmp_path: Path) -> None:
    child = (
        "based_on: parent.yaml\ntrain: {rows: 2, lora: null}\n"
        "data: {drop: [c]}\ndrafter: {options: {num_heads: 4}}\nserve: {nodes: null}\n"
    )
    write(tmp_path, parent=PARENT, child=child)
    found = load_recipe(str(tmp_path / "child.yaml"), ["train.clip=2"])
    assert (found.train.steps, found.train.rows, found.train.lora) == (5, 2, None)
    assert found.data.drop == ("c",)
    assert found.drafter.options == {"num_heads": 4, "decay": 0.5}
    assert (found.serve.policy, found.serve.nodes, found.drafter.init) == ("direct", None, "target")
    assert (found.name, found.summary, found.paper) == ("child", "", "P")
    assert found.origin["train.steps"] == found.origin["paper"] == "recipe parent"
    assert found.origin["name"] == found.origin["train.rows"] == "recipe child"
    assert found.origin["serve.nodes"] == found.origin["train.lora"] == "recipe child"
    assert (found.origin["train.clip"], found.origin["train.seed"]) == ("--set", "base")
    assert load_recipe(str(tmp_path / "parent.yaml")).train.rows == 4  # nothing shared was changed


def test_another_family_takes_over_neither_options_nor_paper(tmp_path: Path) -> None:
    write(tmp_path, parent=PARENT, child="based_on: ./parent.yaml\ndrafter: {family: eagle}\n")
    found = load_recipe(str(tmp_path / "child.yaml"))
    assert (found.drafter.options, found.drafter.init, found.paper) == ({}, None, "")
    assert found.train.steps == 5


def test_sources_are_found_through_the_parent_until_a_value_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, parent=PARENT, child="based_on: parent.yaml\ntrain:\n  rows: 2\n")
    write(tmp_path, grandchild="based_on: child.yaml\ntrain:\n  clip: 2.0  # ours: two\n")
    notes = notes_of_recipe(lineage(str(tmp_path / "grandchild.yaml")))
    assert notes == {"train.steps": "eagle: why five", "train.clip": "ours: two"}


def test_a_run_and_a_recipe_of_specctl_may_be_parents(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", run="recipe: {name: earlier, train: {steps: 4}}\norigin: {}\n")
    write(tmp_path, child="based_on: run\n", other="based_on: qwen3-8b-eagle3\n")
    assert load_recipe(str(tmp_path / "child.yaml")).train.steps == 4
    other = load_recipe(str(tmp_path / "other.yaml"))
    assert other.train == load_recipe("qwen3-8b-eagle3").train
    assert other.name == "other"


def test_a_recipe_in_memory_may_have_a_parent() -> None:
    made = recipe_of({"based_on": "eagle3", "train": {"steps": 7}}, None, {})
    assert (made.drafter, made.train.steps) == (load_recipe("eagle3").drafter, 7)


def test_a_circle_is_refused_by_its_chain(tmp_path: Path) -> None:
    write(tmp_path, a="based_on: b.yaml", b="based_on: c.yaml", c="based_on: ./b.yaml")
    error = problem(tmp_path, "a")
    names = [Path(one).name for one in error.found.split(" -> ")]
    assert names == ["a.yaml", "b.yaml", "c.yaml", "b.yaml"]
    assert error.where == f"{tmp_path / 'c.yaml'}:based_on"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("eagel3", "eagle3"),
        ("nowhere.yaml", "recipes ls"),
        ("3", "eagle3"),
        ("x" * 400, "recipes ls"),
    ],
)
def test_an_unknown_parent_is_refused(tmp_path: Path, named: str, expected: str) -> None:
    write(tmp_path, child=f"based_on: {named}")
    error = problem(tmp_path, "child")
    assert error.where.endswith("child.yaml:based_on")
    assert expected in error.do


def test_a_mistake_is_told_of_the_file_that_makes_it(tmp_path: Path) -> None:
    write(tmp_path, parent="train: {steps: 0}", child="based_on: parent.yaml\nname: mine\n")
    assert problem(tmp_path, "child").where == f"{tmp_path / 'parent.yaml'}:train.steps"
    write(tmp_path, other="base_on: parent.yaml")
    assert "write based_on" in problem(tmp_path, "other").do


def test_a_copy_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("quickstart", "svip", "llama3.3-70b-eagle3", "llama3.1-8b-adaspec"):
        assert main(["recipes", "cp", name, str(tmp_path / "copy.yaml"), "--force"]) == 0
        text = (tmp_path / "copy.yaml").read_text()
        assert "based_on" not in text
        assert text == whole_text(lineage(name))
        copy = load_recipe(str(tmp_path / "copy.yaml"))
        assert copy.to_json() == load_recipe(name).to_json()
        assert list(copy.stages) == list(load_recipe(name).stages)
        assert notes_of_recipe(lineage(str(tmp_path / "copy.yaml"))) == notes_of_recipe(
            lineage(name)
        )


def test_what_holds_of_all_recipes_for_real_targets_is_said_of_them_alone(tmp_path: Path) -> None:
    write(tmp_path, mine="based_on: qwen3-8b-eagle3")
    said = {info.name: advice(lineage(info.name)) for info in list_recipes()}
    assert all((said[i.name] == "") == (i.target == "tiny") for i in list_recipes())
    assert "--data" in said["qwen3-8b-eagle3"]
    assert "--data" not in said["llama3-8b-goose"]  # nothing to train
    assert advice(lineage(str(tmp_path / "mine.yaml"))) == ""


def test_bases_are_no_recipes_and_each_is_a_parent() -> None:
    parents = {layer.name for name in recipe_names() for layer in lineage(name)}
    assert set(base_names()) <= parents
    assert not set(base_names()) & set(recipe_names())
