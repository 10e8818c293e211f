"""A target whose file is packed writes answers as it is packed, and is read widened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe, TargetPart
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data import prepare as preparing
from specctl.train.data.prepare import prepare
from specctl.train.data.written import writing_target as writing
from specctl.train.data.written.writing_target import writes_packed, writing_target, written_in
from specctl.train.planning.plan import plan

SMALL = ["data.prompts=3", "data.prompt_tokens=8", "data.new_tokens=4", "data.text_tokens=0",
         "train.seq_len=32"]  # fmt: skip


@pytest.fixture
def packed(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A second copy of the embedded target, which stands for the file as it is packed."""
    copy = replace(tiny_target, name="as packed")
    monkeypatch.setattr(writing, "_packed_bytes", lambda *given: 10**6)
    monkeypatch.setattr(writing, "load_part", lambda part, **more: copy)
    return copy


def recipe_of(*sets: str) -> Recipe:
    return load_recipe("eagle3", [*SMALL, *sets])


def part_of(*sets: str) -> TargetPart:
    return recipe_of(*sets).target


def test_a_packed_file_writes_as_it_is_packed(tiny_target: Target, packed: Target) -> None:
    assert writing_target(part_of(), tiny_target) is packed
    assert written_in(part_of(), tiny_target) == "gguf"


def test_a_target_of_other_weights_does_not_write(
    tiny_target: Target, packed: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(packed, fingerprint="0" * 64)
    monkeypatch.setattr(writing, "load_part", lambda part, **more: other)
    assert writing_target(part_of(), tiny_target) is tiny_target


@pytest.mark.parametrize("given", ["target.dtype=float32", "target.inflate=100m"])
def test_what_was_set_by_hand_writes(tiny_target: Target, packed: Target, given: str) -> None:
    assert not writes_packed(part_of(given), tiny_target)
    assert writing_target(part_of(given), tiny_target) is tiny_target


def test_a_folder_is_not_packed(tiny_target: Target) -> None:
    assert not writes_packed(part_of(), tiny_target)
    assert written_in(part_of(), tiny_target) == "torch.float32"


def test_answers_are_those_of_the_packed_target(
    tiny_target: Target, packed: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    regenerate: Callable[..., Any] = preparing.regenerate

    def seen(target: Target, *given: Any, **more: Any) -> Any:
        asked.append(target.name)
        return regenerate(target, *given, **more)

    monkeypatch.setattr(preparing, "regenerate", seen)
    prepare(recipe_of(), tiny_target, tmp_path, SilentReporter())
    assert asked == ["as packed"]
    prepare(recipe_of(), tiny_target, tmp_path, SilentReporter())
    assert asked == ["as packed"]  # the rows are there


def test_a_plan_counts_the_copy_that_writes(packed: Target) -> None:
    """It is loaded beside the widened target, before there is a drafter."""
    found = plan(recipe_of(), flops_per_second=1e9)
    assert found.held.writing["target, as its file packs it"] == 10**6
    assert found.held.writing["target"] == found.held.host["target"]
    assert found.to_json()["memory_writing"] == found.held.writing
    elsewhere = plan(recipe_of("data.endpoint=http://a:1"), flops_per_second=1e9)
    assert not elsewhere.held.writing
    assert "memory_writing" not in elsewhere.to_json()


def test_writing_is_the_fullest_moment_where_the_copy_is_large(
    packed: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_packed_bytes", lambda *given: 10**10)
    held = plan(recipe_of(), flops_per_second=1e9).held
    assert held.moment == "answers are written"
    assert held.host_bytes > 10**10


@pytest.mark.parametrize("given", ["auto", pytest.param("float32", marks=pytest.mark.proof)])
def test_a_plan_says_that_nothing_is_added_to_a_packed_file(
    packed: Target, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Whatever it is trained in: drafting reads the file anew."""
    sets = [*SMALL, f"target.dtype={given}"]
    (said,) = plan(load_recipe("uno", sets)).remarks
    assert "--dtype float32" in said
    assert plan(load_recipe("jump", [*sets, "drafter.options.rank=null"])).remarks == ()
    monkeypatch.setattr(writing, "_packed_bytes", lambda *given: 0)
    (said,) = plan(load_recipe("uno", [*sets, "vocab.size=2048"])).remarks
    assert "2,048 of 6,144 ids" in said
