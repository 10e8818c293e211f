"""A slice of benchmarks/load.py: same answers in every way; where speculation stops to pay."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WAYS = ("length 3", "goodput", "tetris", "goodput over http", "transformers")
SLICE = "--users 2 --lengths 3 --tokens 8 --rounds 1 --repeats 1 --prompts 4 --http"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("load")


@pytest.mark.proof  # of answers in batches of any kind, tests/runtime/engine/test_any_batch.py
def test_every_way_gives_the_answers_of_plain_decoding(load: ModuleType, tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    args = load.options([*SLICE.split(), "--only", ",".join(WAYS)])
    found = load.report(args, tmp_path, kept.append)
    assert kept == [found]
    assert {row["way"] for row in found["rows"]} == {"plain", *WAYS}
    for row in found["rows"]:
        assert row["identical"] == (None if "http" in row["way"] else 1.0), row
        assert row["tokens_per_second"] > 0
        assert 0 < row["first_ms"][0] <= row["first_ms"][1]
        assert 0 < row["inter_token_ms"][0] <= row["inter_token_ms"][1]
        assert row.get("tau", 1.0) >= 1.0
    [fixed] = [row for row in found["rows"] if row["way"] == "length 3"]
    assert fixed["tau"] > 1.0
    expected = {row["way"] for row in found["rows"] if row.get("goodput") is not None}
    assert expected == {"goodput", "goodput over http"}, "the ways whose policy predicts"
    assert {table["batch"] for table in found["costs"]} == {1, 2}
    assert set(found["break_even_users"]) == {"length 3", "goodput", "tetris"}


def test_break_even_lies_between_the_loads_where_the_gain_changes_sign(load: ModuleType) -> None:
    plain = {1: 100.0, 4: 200.0, 16: 300.0}
    assert load.break_even({1: 150.0, 4: 220.0, 16: 270.0}, plain) == pytest.approx(8.0)
    assert load.break_even({1: 90.0, 4: 220.0, 16: 270.0}, plain) == 1.0
    assert load.break_even({1: 150.0, 4: 220.0, 16: 330.0}, plain) is None


def test_quantiles_are_values_that_were_measured(load: ModuleType) -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert load.quantile(values, 0.5) == 51.0
    assert load.quantile(values, 0.99) == 100.0
    assert math.isnan(load.quantile([], 0.5))


def test_tokens_that_come_together_share_the_time(load: ModuleType) -> None:
    ways = importlib.import_module("load_ways")
    stamps = ways.Stamps(started=10.0, pieces=[(10.5, 2), (11.1, 3), (11.3, 1)])
    answer = stamps.answer()
    assert answer.first == 0.5
    assert answer.num_tokens == 6
    assert answer.gaps == pytest.approx((0.2, 0.2, 0.2, 0.2))
