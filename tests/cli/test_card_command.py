"""The command on a card measures what the card says, and the program understands it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.api.measured.measurement import run_words
from specctl.api.train import packaged_acceptance
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions, options_of
from specctl.export.formats import export
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import read_manifest
from specctl.models.llama.fast_llama import FastLlama
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.assemble import decoder
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.prune.cut import fitted
from specctl.train.prune.run import whole_target
from specctl_testing.cli import commands

MEASURED = {"tau": 2.5, "accepted_per_position": [0.7, 0.5], "prompts": 12}


def command_of(folder: Path) -> list[str]:
    """The words below "Measured" on a card, after `specctl`."""
    card = (folder / "README.md").read_text()
    found = re.search(r"^Measured.*by:\n\n    specctl (.*)$", card, re.MULTILINE)
    assert found, card
    return shlex.split(found[1])


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.fixture
def noisy(tiny_target: Target) -> SmallLm:
    """The target as its own drafter, disturbed: it accepts some."""
    whole = whole_target(tiny_target)
    assert isinstance(whole.lm, FastLlama)
    options = SmallLmOptions(**options_of(whole.lm.module.shape, tiny_target.spec))
    drafter = SmallLm(options, tiny_target.spec, None)
    generator = torch.Generator().manual_seed(0)
    state = {name: t.float().clone() for name, t in whole.lm.module.state_dict().items()}
    for tensor in state.values():
        tensor += 0.4 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    drafter.load_tensors(fitted(drafter, state, None))
    return drafter.to(tiny_target.device, tiny_target.dtype)


def trained(drafter: SmallLm, target: Target, folder: Path, sets: tuple[str, ...] = ()) -> Path:
    """A package as a run on the built-in corpus leaves it, measured as a run measures."""
    some = ("train.tau_prompts=2", "train.tau_tokens=12", "serve.length=3", *sets)
    recipe = load_recipe("distill", sets=some)
    prompts = [prompt.ids for prompt in heldout_prompts(target, recipe.train.tau_prompts)]
    found = decoder(recipe.serve, recipe.train, target, drafter, prompts)().to_json()
    words = run_words(recipe, target, folder)
    save_package(
        drafter,
        target,
        folder,
        serve=recipe.to_json()["serve"],
        recipe_digest=recipe.digest,
        acceptance=packaged(found, recipe, target, words),
        command=["specctl"],
    )
    return folder


def packaged(
    measured: Mapping[str, Any], recipe: Recipe, target: Target, words: Sequence[str]
) -> dict[str, Any] | None:
    """As the package of a run by that recipe records it."""
    return packaged_acceptance(measured, recipe.data, recipe.train.tau_tokens, target, words)


def test_the_cards_command_measures_the_cards_tau(
    noisy: SmallLm, tiny_target: Target, tmp_path: Path, run: Callable[..., Any]
) -> None:
    folder = trained(noisy, tiny_target, tmp_path / "package")
    words = [word.replace("THIS_FOLDER", str(folder)) for word in command_of(folder)]
    ran = run(*words, "--repeats", "1", "--json")
    assert ran.code == 0, ran.err
    recorded = read_manifest(folder).acceptance
    assert recorded is not None
    [row] = [row for row in ran.json["result"]["rows"] if row["name"] != "plain"]
    assert 1.2 < recorded.tau < 3.9
    assert row["tau"] == pytest.approx(recorded.tau, abs=1e-9)
    assert ran.json["result"]["target"]["dtype"] == value_of(words, "--dtype")


def test_the_command_names_target_dtype_inflation_prompts_and_settings(
    noisy: SmallLm, tiny_target: Target, tmp_path: Path
) -> None:
    there = {"name": "owner/model", "revision": "a" * 40, "inflated": "300m"}
    recipe = load_recipe("distill")
    target = replace(tiny_target, **there)
    found = packaged(MEASURED, recipe, target, ["specctl"])
    assert found is not None
    words = shlex.split(found["command"])[1:]
    assert commands.why_not(words) is None
    wanted = {
        "--target": "owner/model",
        "--set": f"target.revision={'a' * 40}",
        "--inflate": "300m",
        "--dtype": str(tiny_target.dtype).removeprefix("torch."),
        "--draft": "THIS_FOLDER",
        "--num-prompts": "12",
        "--batch": "12",
        "--max-new-tokens": str(recipe.train.tau_tokens),
        "--temperature": "0",
    }
    assert {flag: value_of(words, flag) for flag in wanted} == wanted
    here = packaged(MEASURED, recipe, replace(target, name="/somewhere/m"), ["specctl"])
    assert here is not None
    assert "--target TARGET_FOLDER" in here["command"]


def test_documents_of_ones_own_are_measured_again_by_the_run(
    tiny_target: Target, tmp_path: Path
) -> None:
    sets = ["train.steps=77", "serve.length=3"]
    flags = {"data.source": "my texts.jsonl", "target.name": "tiny"}
    named = {"data.source": "--data", "target.name": "--target"}
    recipe = load_recipe("eagle3", sets, flags=flags, named=named)
    words = run_words(recipe, tiny_target, tmp_path / "run")
    found = packaged(MEASURED, recipe, tiny_target, words)
    assert found is not None
    assert found["data"].startswith("documents of the training data")
    again = shlex.split(found["command"])[1:]
    assert commands.why_not(again) is None
    assert value_of(again, "--data") == "my texts.jsonl"
    assert value_of(again, "--target") == "tiny"
    given = again[again.index("--recipe") + 1]
    changes = [again[i + 1] for i, word in enumerate(again) if word == "--set"]
    same = load_recipe(given, changes, flags=flags, named=named)
    dtype = str(tiny_target.dtype).removeprefix("torch.")
    wanted = load_recipe("eagle3", [*sets, f"target.dtype={dtype}"], flags=flags, named=named)
    assert same.to_json() == wanted.to_json()


def test_an_export_says_that_its_package_was_measured(
    noisy: SmallLm, tiny_target: Target, tmp_path: Path
) -> None:
    folder = trained(noisy, tiny_target, tmp_path / "package")
    export(folder, "gguf", tmp_path / "gguf", tiny_target)
    assert "Measured, with the package" in (tmp_path / "gguf" / "README.md").read_text()
    assert commands.why_not(command_of(tmp_path / "gguf")) is None
