"""The card says what a reader needs, and nothing about the machine it was written on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.vocab import VocabMap
from specctl.export.package.card import render_card
from specctl.export.package.folder import save_package
from specctl.export.package.load import load_package
from specctl.export.package.manifest import Manifest, check_files, read_manifest
from specctl.runtime.target.target import Target

MEASURED = {
    "tau": 2.345,
    "alpha": [0.7, 0.55],
    "command": "specctl bench --draft /home/somebody/runs/x/package --suite code",
    "data": "/srv/data/heldout.jsonl",
    "temperature": 0.0,
    "prompts": 12,
    "new_tokens": 48,
}
COMMAND = ["specctl", "train-draft", "--out=/home/somebody/runs/x", "--data", "~/secret place/d"]


@pytest.fixture
def manifest(make_toy: Any, save: Any, plain_target: Target) -> Manifest:
    vocab = VocabMap(torch.arange(0, 48, 2), plain_target.spec.vocab_size)
    return read_manifest(save(make_toy(vocab), acceptance=MEASURED, command=COMMAND))


def test_the_card_states_target_acceptance_and_use(manifest: Manifest) -> None:
    card = render_card(manifest)
    for text in (
        "# Draft model for some/target",
        "base_model: some/target",
        "family `toy`",
        "24 of the target's 48 token ids",
        "2.345",
        "0.700, 0.550",
        "specctl bench --draft package --suite code",
        "| data | heldout.jsonl |",
        "--draft THIS_FOLDER",
        "specctl verify THIS_FOLDER --target some/target",
        "lossless",
        "## Licence",
        manifest.target.fingerprint,
    ):
        assert text in card, text
    assert card.isascii()


def test_the_card_names_no_machine_path_and_no_secret(manifest: Manifest) -> None:
    target = manifest.target.model_copy(update={"name": "/home/somebody/models/big", "repo": None})
    secret = "hf_abcdefghijklmnop"
    acceptance = manifest.acceptance
    assert acceptance is not None
    changed = manifest.model_copy(
        update={
            "target": target,
            "command": (*manifest.command, "--name", f"x{secret}", secret),
            "acceptance": acceptance.model_copy(update={"data": f"set {secret}"}),
        }
    )
    card = render_card(changed)
    assert "Draft model for big" in card
    assert "--target TARGET_FOLDER" in card
    for hidden in ("/home", "somebody", "/srv", "~/", "secret place", secret[3:]):
        assert hidden not in card, hidden
    assert re.search(r"--out=x\b", card)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lossless_is_said_with_the_arithmetic_and_what_it_means(
    manifest: Manifest, dtype: str
) -> None:
    assert manifest.target.dtype == "float32"
    exact = render_card(manifest)
    assert "lossless in float32" in exact
    assert "under greedy decoding its tokens" in exact
    assert "nearly tie" not in exact
    target = manifest.target.model_copy(update={"dtype": dtype})
    rounded = render_card(manifest.model_copy(update={"target": target}))
    assert f"Verification is lossless in {dtype}, whatever is drafted: the distribution" in rounded
    assert "up to rounding" in rounded
    assert "greedy texts may differ from those of plain decoding and of other engines" in rounded


def test_a_package_of_before_that_names_no_arithmetic_still_loads(
    package: Path, plain_target: Target, reseal: Any
) -> None:
    reseal(package, lambda body: body["target"].pop("dtype"))
    assert "dtype" not in read_manifest(package).to_json()["target"]
    assert load_package(package, plain_target).family == "toy"
    card = render_card(check_files(package))
    assert "Verification is lossless, whatever is drafted: in float32 the distribution" in card
    assert "in bfloat16 and float16" in card


def test_an_unmeasured_drafter_says_so(package: Path) -> None:
    assert "Not measured" in (package / "README.md").read_text()


def test_the_card_of_the_package_is_what_the_manifest_renders(package: Path) -> None:
    assert (package / "README.md").read_text() == render_card(check_files(package))


def test_an_approximate_drafter_is_marked(
    make_toy: Any, plain_target: Target, tmp_path: Path
) -> None:
    drafter = make_toy()
    drafter.lossless = False
    inflated = replace(plain_target, inflated="300m")
    manifest = save_package(
        drafter,
        inflated,
        tmp_path / "p",
        serve={},
        recipe_digest="",
        acceptance=None,
        command=[],
    )
    assert manifest.verification == "approximate"
    card = (tmp_path / "p" / "README.md").read_text()
    assert "**approximate**" in card
    assert "--inflate 300m" in card


def test_an_hf_card_has_transformers_lines(manifest: Manifest) -> None:
    card = render_card(manifest.model_copy(update={"format": "hf"}))
    assert "library_name: transformers" in card
    assert "assistant_model=draft" in card
    assert 'from_pretrained("some/target")' in card
    local = manifest.target.model_copy(update={"name": "tiny", "repo": None})
    card = render_card(manifest.model_copy(update={"format": "hf", "target": local}))
    assert 'from_pretrained("TARGET_FOLDER")' in card
    assert "specctl generate --target tiny" in card
