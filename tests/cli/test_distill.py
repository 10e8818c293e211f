"""`specctl distill`: flags that name a method become fields of the recipe, each with its origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLAGS = {
    "--layers": ("2", "drafter.options.layers", 2),
    "--width": ("64", "drafter.options.width", 64),
    "--loss": ("jsd", "drafter.options.loss", "jsd"),
    "--on-policy": ("0.25", "data.on_policy", 0.25),
    "--select": ("random", "train.select", "random"),
    "--data": ("words.txt", "data.source", "words.txt"),
}


def value_at(tree: dict[str, Any], field: str) -> Any:
    for key in field.split("."):
        tree = tree[key]
    return tree


def test_every_flag_sets_its_field_and_is_named_as_its_origin(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("a few words\n")
    words = [word for flag, (value, _, _) in FLAGS.items() for word in (flag, value)]
    ran = run("distill", *words, "--set", "train.steps=3", "--dry-run", "--json")
    assert ran.code == 0, ran.err
    answer = ran.json["result"]
    for flag, (_, field, value) in FLAGS.items():
        assert value_at(answer["recipe"], field) == value
        assert answer["origin"][field] == flag
    assert answer["origin"]["train.steps"] == "--set"
    assert answer["origin"]["drafter.family"] == "recipe distill"


def test_from_is_where_the_weights_begin_and_reference_goes_with_select(
    run: Callable[..., Any],
) -> None:
    words = ["--from", "target", "--select", "highest", "--reference", "owner/x"]
    ran = run("distill", *words, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    recipe = ran.json["result"]["recipe"]
    assert recipe["drafter"]["init"] == "target"
    assert recipe["train"]["reference"] == "owner/x"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--loss", "lk"], "lk_alpha"),
        (["--reference", "runs/x"], "reference is ignored"),
        (["--select", "most"], "train.select"),
    ],
)
def test_a_flag_that_makes_no_sense_names_the_field_and_the_remedy(
    run: Callable[..., Any], words: list[str], hint: str
) -> None:
    ran = run("distill", *words, "--dry-run")
    assert ran.code == 3
    assert hint in ran.err
