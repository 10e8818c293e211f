"""Every figure of a recipe for a real target says which paper or trainer it is from, or is ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specctl.cli.main import main
from specctl.recipes.files import recipe_names
from specctl.recipes.lineage import Layer, lineage, overlay
from specctl.recipes.load import EMBEDDED, load_recipe
from specctl.recipes.notes import OURS, notes_of, notes_of_recipe, source_of, sources
from specctl.recipes.section import flatten

HOUSEKEEPING = ("train.save_every", "train.tau_every")  # decide nothing of what is learned


def layers_for_real_targets() -> dict[str, list[Layer]]:
    layers = {name: lineage(name) for name in recipe_names()}
    return {n: own for n, own in layers.items() if overlay(own)[0]["target"]["name"] != EMBEDDED}


def is_figure(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def test_every_figure_for_a_real_target_has_its_source_or_is_ours() -> None:
    lacking, used = [], set[str]()
    for name, layers in layers_for_real_targets().items():
        notes = notes_of_recipe(layers)
        used |= {source_of(note) for note in notes.values()}
        figures = {f for f, v in flatten(overlay(layers)[0]).items() if is_figure(v)}
        lacking += [f"{name} {f}" for f in figures - notes.keys() if f not in HOUSEKEEPING]
    assert not lacking
    assert used - {OURS} == set(sources())


def test_a_note_belongs_to_the_value_before_it() -> None:
    text = (
        "name: x  # a\ntrain: {steps: 4, rows: 2}  # b\nstages:\n  one:\n    train:\n"
        "      steps: 3  # eagle: c # d\n      rows: 5\n  # e\nsummary: >-\n  no # f\n"
    )
    assert notes_of(text) == {"name": "a", "train": "b", "stages.one.train.steps": "eagle: c # d"}


def test_show_gives_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--json", "recipes", "show", "qwen3-8b-eagle3", "--set", "train.clip=0.4"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    found = told.get("result", told)
    assert found["notes"]["train.learning_rate"].startswith("eagle3: ds_config.json")
    assert "train.clip" not in found["notes"]  # what is set by hand is nobody's
    assert "2503.01840" in found["sources"]["eagle3"]
    assert found["based_on"] == ["llama3-8b-eagle3", "chats"]
    assert found["origin"]["train.learning_rate"] == "recipe llama3-8b-eagle3"
    assert "beside it, or why it is ours" in found["advice"]


def test_recipes_are_listed_by_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "recipes", "ls", "--target", "qwen3-8b"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = told.get("result", told)["recipes"]
    assert {info["target"] for info in found} == {"qwen3-8b"}
    assert "qwen3-8b-eagle3" in {info["name"] for info in found}
    assert load_recipe("qwen3-8b-eagle3").drafter.options["ttt_steps"] == 7
