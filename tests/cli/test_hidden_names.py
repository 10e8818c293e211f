"""A built-in name and a folder called alike: one precedence everywhere, and a note."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import specctl
from specctl.api.arguments.drafting import DRAFTING, load_draft
from specctl.api.arguments.targets import own_target
from specctl.core.errors import FileError
from specctl.export.package.find import Kind, locate
from specctl.export.package.folder import load_drafter
from specctl.recipes.built_in import HiddenName
from specctl.recipes.load import load_recipe
from specctl.recipes.targets import resolve
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import packaged, shaken

RUN_YAML = "recipe: {name: mine, drafter: {family: small-lm}, train: {steps: 7}}\n"


@pytest.fixture(scope="module")
def place(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds runs called as a family, a free drafter and a recipe, and one called as a
    target."""
    folder: Path = tmp_path_factory.mktemp("place")
    for name in ("eagle3", "prompt-lookup", "distill", "mine"):
        packaged(shaken("small-lm", tiny_target), tiny_target, folder / name / "package")
        (folder / name / "run.yaml").write_text(RUN_YAML)
    (folder / "tiny").mkdir()
    (folder / "tiny" / "notes.txt").write_text("no model")
    (folder / "svip").write_text("no stop rule")
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


@pytest.mark.parametrize("name", ["eagle3", "distill"])
def test_a_bare_word_is_the_recipe_and_a_path_the_folder(name: str) -> None:
    with pytest.warns(HiddenName, match=rf"{name} is the recipe .* \./{name}"):
        assert load_recipe(name).train.steps != 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in (f"./{name}", str(Path(name).resolve()), Path(name)):
            assert load_recipe(path).train.steps == 7
        assert load_recipe("mine").train.steps == 7


def test_a_bare_word_is_the_drafter_and_a_path_the_folder(tiny_target: Target) -> None:
    with pytest.warns(HiddenName):
        assert locate("prompt-lookup").kind is Kind.FAMILY
    for path in ("./prompt-lookup", Path("prompt-lookup"), "mine"):
        assert locate(path).kind is Kind.PACKAGE
    with pytest.warns(HiddenName):
        assert load_drafter("prompt-lookup", tiny_target).family == "prompt-lookup"
    assert load_drafter("./prompt-lookup", tiny_target).family == "small-lm"


@pytest.mark.parametrize("name", ["eagle3", "distill"])
def test_a_name_that_must_be_trained_offers_the_folder(name: str, tiny_target: Target) -> None:
    with pytest.warns(HiddenName), pytest.raises(FileError, match="not a drafter") as caught:
        locate(name)
    assert caught.value.do.startswith(f"give ./{name}")
    assert load_drafter(f"./{name}", tiny_target).family == "small-lm"  # as it says


def test_what_is_known_of_a_drafter_is_known_of_the_same_one(tiny_target: Target) -> None:
    """The target that it was made for, and what its measured costs are kept under."""
    assert own_target("prompt-lookup") is None
    assert own_target("./prompt-lookup") is not None
    assert own_target(Path("prompt-lookup")) is not None
    none = dict.fromkeys(DRAFTING, None) | {"translate": "auto"}
    with pytest.warns(HiddenName):
        by_word = load_draft("prompt-lookup", tiny_target, **none)
    by_path = load_draft(Path("prompt-lookup"), tiny_target, **none)
    assert by_word.source == "prompt-lookup"
    assert (by_path.name, len(by_path.source)) == ("./prompt-lookup", 64)


def test_a_target_is_its_alias_and_a_stop_rule_its_name(tiny_target: Target) -> None:
    with pytest.warns(HiddenName, match="tiny is the target"):
        assert resolve("tiny").path != Path("tiny")
    assert resolve("./tiny").path == Path("tiny")
    with pytest.warns(HiddenName, match="svip is the stop rule"):
        draft = load_draft("./mine", tiny_target, stop_rule="svip")
    assert draft.policy is not None


def notes(ran: Any) -> list[str]:
    return [text for text in ran.json["warnings"] if "of that name" in text and "tiny" not in text]


def test_every_command_says_which_it_took(run: Any) -> None:
    shown = run("recipes", "show", "eagle3", "--json")
    assert shown.json["result"]["recipe"]["drafter"]["family"] == "eagle3"
    assert len(notes(shown)) == 1
    assert (
        run("recipes", "show", "./eagle3", "--json").json["result"]["recipe"]["train"]["steps"] == 7
    )
    for words in (("verify", "eagle3"), ("bench", "eagle3"), ("generate", "-d", "eagle3", "x")):
        ran = run(*words, "--json")
        assert ran.json["error"]["do"].startswith("give ./eagle3"), words
        assert len(notes(ran)) == 1, words
    by_word = run("verify", "prompt-lookup", "--level", "files", "--json")
    assert by_word.json["result"]["checks"][0]["note"] == "nothing stored"
    by_path = run("verify", "./prompt-lookup", "--level", "files", "--json")
    assert "digest" in by_path.json["result"]["checks"][0]["note"]


def test_where_only_folders_can_be_meant_the_folder_is(run: Any, tmp_path: Path) -> None:
    ran = run("export", "eagle3", "--to", "specctl", "--out", tmp_path / "out", "--json")
    assert (ran.code, len(notes(ran))) == (0, 1)
    ran = run("export", "./eagle3", "--to", "specctl", "--out", tmp_path / "again", "--json")
    assert (ran.code, notes(ran)) == (0, [])
    assert run("show", "eagle3", "--json").json["result"]["kind"] == "run"
    assert run("show", "tiny", "--json").json["result"]["kind"] == "target"
    assert run("show", "./tiny").code == 4
    assert specctl.export("eagle3", "specctl", tmp_path / "third").out.is_dir()
