"""A plan knows which features lie in a shared folder already, and plans to read the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specctl.core.drafter import Needs
from specctl.recipes.load import load_recipe, with_fields
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target, load_part
from specctl.train.assemble import trainable_family
from specctl.train.data.prepare import prepare
from specctl.train.distributed.ranks import Ranks
from specctl.train.features import shards
from specctl.train.features.capture import training_needs
from specctl.train.features.offline import feature_source
from specctl.train.features.stored_rows import StoredRows, stored_rows
from specctl.train.planning.amounts import AmountCosts
from specctl.train.planning.calibration import calibrate
from specctl.train.planning.data_facts import DataFacts
from specctl.train.planning.pace import Pace
from specctl.train.planning.plan import build_shape
from specctl.train.planning.target_shape import target_shape
from specctl.train.planning.work import READING
from specctl_testing.train.of_recipe import preparation_of

MOST = 200  # rows
SETS = (
    "data.regenerate=false", "data.format=text", "data.features=offline", "train.rows=2",
    "train.seq_len=48", "train.tau_prompts=1", "train.tau_tokens=4", "train.steps=10",
    "vocab.size=64",
)  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    file = tmp_path / "words.txt"
    file.write_text("\n\n".join(f"def add_{i}(x):\n    return x + {i}" for i in range(120)))
    given = [*SETS, f"data.source={file}", f"data.features_at={tmp_path / 'features'}"]
    return load_recipe("eagle3", given)


@pytest.fixture
def target(recipe: Recipe) -> Target:
    return load_part(recipe.target, device="cpu", is_read_only=True)


def needs_of(recipe: Recipe, target: Target) -> Needs:
    family = trainable_family(recipe.drafter, None)
    return training_needs(build_shape(family, recipe.drafter, recipe.vocab.size, target.spec))


def there(recipe: Recipe, target: Target, needs: Needs, out: Path, most: int) -> StoredRows | None:
    """The rows of a run in `out` whose features are kept."""
    return stored_rows(preparation_of(recipe, target), recipe.train, needs, out, most)


def kept(recipe: Recipe, target: Target, out: Path) -> int:
    """The rows of a run in `out`, whose features are read now."""
    data, needs = prepare(recipe, target, out), needs_of(recipe, target)
    feature_source(
        recipe.data, recipe.train.rows, target, data, needs, out, SilentReporter(), Ranks()
    )
    return data.num_rows


def test_a_calibrated_plan_reads_only_what_is_missing(
    recipe: Recipe, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, other = needs_of(recipe, target), tmp_path / "other"
    assert there(recipe, target, needs, other, MOST) is None
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)  # eight rows each
    rows = kept(recipe, target, tmp_path / "run")
    assert rows > 16
    assert there(recipe, target, needs, other, MOST) == StoredRows(rows, rows)
    whole = calibrate(recipe, target_shape(recipe.target))
    assert whole is not None
    assert whole.read > 0 == whole.read_once
    said = {part.name: part for part in whole.parts(recipe.data, recipe.train, 1000, (0.8, 1.25))}
    assert said[READING].amount == f"features: {rows} of {rows} rows already there"
    assert said[READING].seconds_range == (0.0, 0.0)
    next((tmp_path / "features").glob("*/shard-00001.json")).unlink()
    assert there(recipe, target, needs, other, MOST) == StoredRows(rows - 8, rows)


def test_features_of_other_rows_or_another_form_are_not_counted(
    recipe: Recipe, target: Target, tmp_path: Path
) -> None:
    rows, needs = kept(recipe, target, tmp_path / "run"), needs_of(recipe, target)

    def stored(other: Recipe, most: int = MOST) -> StoredRows | None:
        return there(other, target, needs, tmp_path / "other", most)

    def changed(**fields: object) -> Recipe:
        return with_fields(recipe, {k.replace("__", "."): v for k, v in fields.items()}, "test")

    assert stored(recipe) == StoredRows(rows, rows)
    assert stored(recipe, rows - 1) is None
    assert stored(changed(train__steps=99, drafter__options__intermediate=None)) is not None
    assert stored(changed(train__seq_len=64)) is None
    assert stored(changed(data__feature_dtype="fp32")) is None
    assert stored(changed(data__features="online", data__features_at=None)) is None
    assert there(recipe, target, replace(needs, taps=(1,)), tmp_path / "o", MOST) is None


def test_a_time_is_divided_by_what_is_left_to_read(recipe: Recipe) -> None:
    facts = DataFacts(100, 20.0, 24, 40.0, 16, 0.5, 900, 0.95)
    pace = Pace(once=1.0, answer=0.0, step=1.0, tau=0.0, save=0.0, read=0.01)
    half = replace(pace, stored=StoredRows(30, 60))
    costs = [
        AmountCosts.of(recipe.data, recipe.train, facts, each, 600.0).answer
        for each in (pace, half)
    ]
    assert costs == pytest.approx([0.6, 0.3])
    parts = [
        {p.name: p for p in each.parts(recipe.data, recipe.train, 1000, (1.0, 1.0))}
        for each in (pace, half)
    ]
    assert [found[READING].seconds_range[0] for found in parts] == pytest.approx([10.0, 5.0])
    assert parts[0][READING].amount == "1,000 tokens"
    said = "features: 30 of 60 rows already there, 500 tokens to read"
    assert parts[1][READING].amount == said
