"""`specctl bench-families`: two families, two steps, on the embedded target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.commands import bench_families
from specctl.cli.commands.bench_families import (
    TrainingBudget,
    chosen,
    family_recipe,
    recipes_of,
    tree_of,
)
from specctl.cli.commands.family_tables import short
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import Exit, RecipeError

SMALL = (
    "data.text_tokens=0", "data.prompts=8", "data.prompt_tokens=16", "data.new_tokens=16",
    "train.rows=2", "train.seq_len=32", "train.tau_prompts=1", "train.tau_tokens=4",
)  # fmt: skip
MEASURED = ("--num-prompts", "1", "--max-new-tokens", "6", "--repeats", "1")
FIGURES = {
    "target", "family", "recipe", "parameters", "train_seconds", "alpha", "tau_chain", "tau_tree",
    "draft_share", "tokens_per_second", "speedup", "speedup_over_assisted",
}  # fmt: skip


def words(families: str, out: Path) -> list[object]:
    sets = [word for field in SMALL for word in ("--set", field)]
    flags = ["--steps", "2", "--out", out, "--dtype", "float32"]
    return ["bench-families", *families.split(","), *flags, *MEASURED, *sets]


def budget(**given: Any) -> TrainingBudget:
    values = {"families": "all", "target": TargetChoice(), "steps": 7, "sets": (), "out": Path("x")}
    return TrainingBudget(**(values | given))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def test_two_families_are_trained_and_measured_alike(run: Any, out: Path) -> None:
    ran = run(*words("medusa,small-lm", out), "--against", "hf", "--json")
    assert ran.code == 0, ran.err[-3000:]
    medusa, lm = ran.json["result"]["rows"]
    assert (medusa["family"], lm["family"], lm["recipe"]) == ("medusa", "small-lm", "distill")
    for row in (medusa, lm):
        assert set(row) >= FIGURES
        assert row["error"] is None
        assert min(row["tau_chain"], row["tau_tree"]) >= 1.0
        assert row["speedup"] == max(row["speedup_chain"], row["speedup_tree"])
        assert row["identical_to_plain"] is True
        assert all(0.0 <= x <= 1.0 for x in row["alpha"])
    assert medusa["speedup_over_assisted"] is None
    assert lm["speedup_over_assisted"] > 0
    assert json.loads((out / "families.json").read_text()) == ran.json["result"]
    assert (out / "families.png").stat().st_size > 0
    made = [(out / name / "data" / "manifest.json").read_text() for name in ("medusa", "small-lm")]
    assert made[0] == made[1], "both have learned from the same rows"


def test_what_is_finished_is_kept_and_a_failing_family_is_a_row(
    run: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = out / "medusa" / "package" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    whole = bench_families.family_recipe

    def broken(family: str, asked: TrainingBudget) -> Any:
        wrong = ("train.steps=3",) if family == "small-lm" else ()
        return whole(family, budget(steps=2, sets=(*asked.sets, *wrong)))

    monkeypatch.setattr(bench_families, "family_recipe", broken)
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(*words("small-lm,medusa", out))
    assert ran.code == Exit.GATE
    assert weights.stat().st_mtime_ns == written
    rows = {row["family"]: row for row in json.loads((out / "families.json").read_text())["rows"]}
    assert rows["medusa"]["error"] is None
    assert "train.steps" in rows["small-lm"]["error"]
    assert "small-lm" in ran.err
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "tiny, greedy" in ran.out


def test_features_on_disk_are_read_once_for_families_alike(run: Any, tmp_path: Path) -> None:
    ran = run(*words("eagle,hass", tmp_path), "--set", "data.features=offline")
    assert ran.code == 0, ran.err[-3000:]
    assert "features: 0 of 1 shards are there, 1 will be written" in ran.err
    assert "features: 1 of 1 shards are there, 0 will be written" in ran.err
    assert len(list((tmp_path / "features").glob("*/shard-*.safetensors"))) == 1


def test_every_family_has_the_same_data_and_budget_and_keeps_its_own_ways() -> None:
    recipes = [family_recipe(name, budget()) for name in chosen("all")]
    assert len(recipes) > 10
    first = recipes[0]
    for recipe in recipes:
        assert (recipe.data, recipe.target, recipe.stages) == (first.data, first.target, {})
        assert recipe.train.steps == 7
        assert recipe.train.rows * recipe.train.seq_len == first.train.rows * first.train.seq_len
    assert len({recipe.train.learning_rate for recipe in recipes}) > 1


def test_a_family_is_trained_by_its_namesake_or_by_the_usual_recipe() -> None:
    assert recipes_of("eagle")[0] == "eagle"
    assert recipes_of("small-lm")[0] == "distill"


def test_the_tree_is_dynamic_or_the_familys_own() -> None:
    assert tree_of(("chain", "dynamic-tree")) == "dynamic-tree"
    assert tree_of(("direct", "chain", "static-tree")) == "direct"
    assert tree_of(("chain",)) is None


@pytest.mark.parametrize("text", ["medusaa", "prompt-lookup", ","])
def test_a_family_that_cannot_be_compared_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="no trained family"):
        chosen(text)


def test_sizes_are_written_in_four_letters() -> None:
    assert [short(n) for n in (950, 1500, 118_000, 2_340_000)] == ["950", "1.5k", "118k", "2.3m"]


def test_how_fast_a_family_learns_stays_its_own() -> None:
    for name in ("eagle3", "small-lm", "dflash"):
        own = family_recipe(name, budget()).train
        assert (own.attention_rate, own.momentum) == (2.0, 0.85), name
    assert family_recipe("small-lm", budget()).train.vocab_rate == 0.1
    assert family_recipe("medusa", budget()).train.attention_rate == 1.0
