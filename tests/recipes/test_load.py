"""Recipes: what is read, where each value came from, and what a wrong recipe says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.core.errors import FileError, RecipeError
from specctl.recipes.foreign_keys import NAMES
from specctl.recipes.load import load_recipe, parse_set
from specctl.recipes.schema import Recipe, section_at
from specctl.recipes.section import flatten


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def problem(folder: Path, text: str, *sets: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), sets)
    return caught.value


def test_an_empty_recipe_is_all_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, ""))
    assert recipe.train == Recipe().train
    assert set(recipe.origin.values()) == {"base", "recipe mine"}
    assert recipe.origin["name"] == "recipe mine"


def test_set_keeps_the_text_that_was_written_where_a_field_is_a_text(tmp_path: Path) -> None:
    recipe = write(tmp_path, "train: {precision: bf16}")
    sets = ("train.precision=no", "data.source=2024", "target.name=off", "train.steps=1e2")
    found = load_recipe(recipe, sets)
    assert (found.train.precision, found.data.source, found.target.name) == ("no", "2024", "off")
    assert found.train.steps == 100
    assert load_recipe(write(tmp_path, "train: {precision: no}")).train.precision == "no"
    assert "is no switch" in problem(tmp_path, "", "train.steps=no").what


def test_every_value_knows_its_origin(tmp_path: Path) -> None:
    path = write(
        tmp_path, "train: {steps: 9}\ndrafter: {family: medusa, options: {num_heads: 2}}\n"
    )
    recipe = load_recipe(path, ["train.rows=3", "drafter.options.depth=1"], target="qwen3-8b")
    assert (recipe.train.steps, recipe.train.rows, recipe.target.name) == (9, 3, "qwen3-8b")
    assert recipe.origin["train.steps"] == "recipe mine"
    assert recipe.origin["drafter.options.num_heads"] == "recipe mine"
    assert recipe.origin["drafter.options.depth"] == "--set"
    assert recipe.origin["train.rows"] == "--set"
    assert recipe.origin["target.name"] == "command line"
    assert recipe.origin["train.clip"] == "base"
    assert set(recipe.origin) == set(flatten(recipe.to_json()))


def test_set_wins_over_a_flag(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, ""), ["target.name=tiny"], target="qwen3-8b")
    assert recipe.target.name == "tiny"
    assert recipe.origin["target.name"] == "--set"


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "drafter: {options: {a: 1e-3, b: 2E5, c: 1e}}"))
    assert recipe.drafter.options == {"a": 1e-3, "b": 2e5, "c": "1e"}
    assert parse_set("x.y=5e-2") == ("x.y", 0.05)


def test_the_digest_ignores_prose_and_sees_values(tmp_path: Path) -> None:
    plain = load_recipe(write(tmp_path, "name: a\n"))
    prose = load_recipe(write(tmp_path, "name: a\nsummary: other words\n"))
    other = load_recipe(write(tmp_path, "name: a\n"), ["train.seed=1"])
    assert plain.digest == prose.digest
    assert plain.digest != other.digest


def test_the_digest_does_not_depend_on_how_a_value_was_given(tmp_path: Path) -> None:
    by_file = load_recipe(write(tmp_path, "name: a\ntrain: {steps: 7, clip: 1}\n"))
    by_set = load_recipe(write(tmp_path, "name: a\n"), ["train.steps=7", "train.clip=1.0"])
    assert by_file.digest == by_set.digest


def test_a_run_folder_is_a_recipe_again(tmp_path: Path) -> None:
    text = "recipe: {name: earlier, train: {steps: 4}}\ncommand: [specctl]\norigin: {}\n"
    (tmp_path / "run.yaml").write_text(text)
    recipe = load_recipe(str(tmp_path))
    assert (recipe.name, recipe.train.steps) == ("earlier", 4)


def test_a_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, ""))
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3  # type: ignore[misc]


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    error = problem(tmp_path, "train: {lerning_rate: 0.1}\n")
    assert "learning_rate" in error.do
    assert error.where.endswith("mine.yaml:train.lerning_rate")
    assert "tau_every" in error.expected


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("data.files", "data.source"),
        ("data.path", "data.source"),
        ("train.lr", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("train.epochs", "train.steps"),
        ("data.steps", "train.steps"),
        ("train.batch_size", "train.rows"),
        ("train.max_new_tokens", "data.new_tokens"),
        ("train.lora.r", "train.lora.rank"),
        ("drafter.layers", "drafter.options.layers"),
        ("drafter.name", "drafter.family"),
        ("serve.num_speculative_tokens", "serve.length"),
    ],
)
def test_a_key_of_other_trainers_or_engines_names_the_field(
    tmp_path: Path, key: str, right: str
) -> None:
    found = problem(tmp_path, "train: {lora: {rank: 4}}", f"{key}=3")
    assert found.do == f"write {right} instead of {key}"


def test_names_of_others_stand_for_fields_and_hide_none() -> None:
    for field, names in NAMES.items():
        section, _, key = field.rpartition(".")
        owner = section_at((*section.split("."), key))
        assert owner is not None
        assert key in owner.model_fields
        assert not {*names.split()} & {*owner.model_fields}
    for section in {field.rpartition(".")[0] for field in NAMES}:
        named = [n for f, names in NAMES.items() if f.rpartition(".")[0] == section
                 for n in names.split()]  # fmt: skip
        assert len(named) == len({*named}), section


@pytest.mark.parametrize("text", ["data: chats.jsonl", "train: {lora: 4}"])
def test_a_value_in_the_place_of_a_section_names_its_first_key(tmp_path: Path, text: str) -> None:
    found = problem(tmp_path, text)
    assert "is a section" in found.what
    assert found.do in ("write data.source: chats.jsonl", "write train.lora.rank: 4")
    assert problem(tmp_path, "", "data=x").do == "--set data.source=x"


def test_an_unknown_section_names_the_nearest_one(tmp_path: Path) -> None:
    assert "write train" in problem(tmp_path, "trian: {steps: 3}\n").do


def test_several_problems_are_all_named(tmp_path: Path) -> None:
    error = problem(tmp_path, "train: {steps: 0, rows: 0, foo: 1}\n")
    assert "foo" in error.what
    assert "train.steps" in error.found
    assert "train.rows" in error.found


def test_one_wrong_value_is_told_once(tmp_path: Path) -> None:
    assert problem(tmp_path, "", "vocab.size=1").found == "1"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.steps=0", "greater than or equal to 1"),
        ("train.steps=many", "valid integer"),
        ("train.learning_rate=2", "less than or equal to 1"),
        ("train.warmup=0.9", "warmup + decay"),
        ("train.clip=.nan", "finite"),
        ("train.keep=1", "greater than or equal to 2"),
        ("serve.policy=tree", "schema --field serve"),
        ("serve.nodes=8", "ignored by policy chain"),
        ("serve.rule=lossy", "schema --field serve"),
        ("vocab.size=-1", "greater than or equal to 2"),
        ("vocab.min_coverage=1.5", "less than or equal to 1"),
        ("data.greedy_share=-0.1", "greater than or equal to 0"),
        ("data.format=xlsx", "one of auto, text, jsonl"),
        ("target.inflate=big", "one of 100m, 300m"),
        ("target.dtype=fp8", "float32, bfloat16"),
        ("export.formats=[gguff]", "schema --field export"),
        ("drafter=3", "a section, not a value"),
    ],
)
def test_a_value_out_of_range_is_refused(tmp_path: Path, setting: str, expected: str) -> None:
    error = problem(tmp_path, "", setting)
    assert expected in f"{error.what}: {error.expected}"
    assert error.do


def test_a_wrong_set_is_blamed_on_the_flag(tmp_path: Path) -> None:
    error = problem(tmp_path, "", "train.steps=0")
    assert error.where == "--set:train.steps"
    assert error.do == "--set train.steps=600 restores the default"


@pytest.mark.parametrize("text", ["train.steps", "=4", "train.=4", ".steps=4"])
def test_a_set_without_field_or_value_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"section\.key=value"):
        parse_set(text)


def test_a_set_below_a_value_is_refused(tmp_path: Path) -> None:
    assert "not a section" in problem(tmp_path, "train: {steps: 3}", "train.steps.more=1").what


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    error = problem(tmp_path, "train:\n  steps: [1\n")
    assert error.where.endswith("mine.yaml:3")


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    assert "written twice" in problem(tmp_path, "train:\n  steps: 1\n  steps: 2\n").found


def test_a_key_that_is_a_list_is_refused(tmp_path: Path) -> None:
    assert "unhashable key" in problem(tmp_path, "[1]: 2\n").found


def test_a_recipe_that_is_a_list_is_refused(tmp_path: Path) -> None:
    assert problem(tmp_path, "- a\n- b\n").found == "list"


def test_an_unknown_recipe_name_shows_the_list() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("eagel3")
    assert "eagle3" in caught.value.do


def test_a_missing_file_offers_a_copy(tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        load_recipe(str(tmp_path / "absent.yaml"))
    assert "recipes cp" in caught.value.do


def test_reading_recipes_imports_no_torch() -> None:
    code = "import sys, specctl.recipes.load as l; l.list_recipes(); print('torch' in sys.modules)"
    source = str(Path(__file__).parents[2] / "src")
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == "False"


def test_opt_tree_expands_as_many_nodes_as_it_keeps() -> None:
    """Its paper's proof that no better tree is missed needs a beam as wide as the budget."""
    assert load_recipe("opt-tree").serve.beam is None
