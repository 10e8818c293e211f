"""Advice that can be followed: what an error or a note says to do does not lead back to it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

import specctl
from specctl.cli.options.names import ENGINES as NAMED
from specctl.core.errors import IncompatibleError, NetworkError, SpecctlError
from specctl.core.messages import installed
from specctl.core.storage import hub_access
from specctl.export.formats import ENGINES, check_name, format_for
from specctl.export.package.manifest import MANIFEST, WEIGHTS, read_manifest
from specctl.recipes.load import load_recipe
from specctl.recipes.targets import resolve
from specctl.runtime.sampling.grammar import GrammarError, GrammarSpec, compile_grammar
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.folders.hub import folder_of
from specctl.runtime.target.placement.device import SHOWN
from specctl.runtime.target.target import Target
from specctl.server.errors import api_error
from specctl_testing.export.engine_cases import packaged, shaken

G = ("generate", "--max-new-tokens", "2")


@pytest.fixture(scope="module")
def package(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights for the embedded target."""
    folder: Path = tmp_path_factory.mktemp("made") / "package"
    return packaged(shaken("small-lm", tiny_target), tiny_target, folder)


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("float7", "float32"), ("fp61", "float16"), ("bf17", "bfloat16"), ("in8", "int8")],
)
def test_a_dtype_that_is_offered_is_one_of_those_that_are_listed(
    wrong: str, right: str, run: Any
) -> None:
    error = run(*G, "--dtype", wrong, "x", "--json").json["error"]
    assert error["do"] == f"--dtype {right}"
    assert right in error["expected"]
    assert right in SHOWN


@pytest.mark.parametrize("wrong", ["vlm", "llamacpp", "gguff", "trt"])
def test_python_offers_the_same_format_as_the_command_line(
    wrong: str, run: Any, package: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecctlError) as caught:
        specctl.export(package, wrong, tmp_path / "out")
    by_flag = run("export", package, "--to", wrong, "-o", tmp_path / "out", "--json").json["error"]
    assert caught.value.do == by_flag["do"]
    near = caught.value.do.removeprefix("--to ")
    assert near == {"vlm": "vllm", "llamacpp": "llama.cpp", "gguff": "gguf", "trt": "trtllm"}[wrong]
    check_name(near)


def test_completion_and_help_name_the_engines_that_there_are() -> None:
    assert tuple(ENGINES) == NAMED
    with pytest.raises(SpecctlError, match="unknown export format"):
        format_for("vlm", "eagle3")


# -- files and folders ---------------------------------------------------------------------------


def test_an_empty_file_of_prompts_is_filled_or_another_is_given(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n \n")
    error = run(*G, "-f", file, "--json").json["error"]
    assert error["do"].startswith(f"write at least one line of text into {file}")
    assert "def main" not in error["do"]
    do = run(*G, "-", "--json", stdin=" ").json["error"]["do"]
    assert do.startswith("echo 'def main(' | specctl generate ")
    assert " - " in do
    error = run("bench", "prompt-lookup", "--prompts", file, "--json").json["error"]
    assert str(file) in error["do"]


def test_a_wrong_type_is_set_right_where_it_was_said(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: many}\n")
    error = run("recipes", "validate", file, "--json").json["error"]
    assert error["do"] == f"write steps: 600 in {file} (the default), or leave steps out"
    file.write_text("train: {steps: 600}\n")  # as it says
    assert run("recipes", "validate", file).code == 0
    by_set = run("plan", "--set", "train.steps=many", "--json").json["error"]
    assert by_set["do"] == "--set train.steps=600 restores the default"
    by_flag = run("plan", "--lr", "7", "--json").json["error"]
    assert "--set" not in by_flag["do"]
    assert "--lr" in by_flag["do"]
    with pytest.raises(SpecctlError) as caught:
        specctl.train("tiny", steps="many")
    assert caught.value.do == "write steps: 600 (the default), or leave steps out"


def test_a_value_of_a_parent_is_set_right_in_the_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("train: {rows: none}\n")
    (tmp_path / "child.yaml").write_text("based_on: parent.yaml\n")
    with pytest.raises(SpecctlError) as caught:
        load_recipe(str(tmp_path / "child.yaml"))
    assert f"in {tmp_path / 'parent.yaml'}" in caught.value.do


LOADERS: dict[str, Callable[[str, Target], object]] = {
    "target": lambda name, beside: specctl.load_target(name),
    "drafter": lambda name, beside: specctl.load_drafter(name, beside),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_folder_that_is_not_there_is_compared_by_its_name_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target: Target
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoints", "notes", "my-model"):
        (tmp_path / name).mkdir()

    def do(name: str) -> str:
        with pytest.raises(SpecctlError) as caught:
            LOADERS[kind](name, tiny_target)
        return caught.value.do

    for far in ("./no-such-folder", f"{tmp_path}/no-such-folder"):
        assert not any(name in do(far) for name in ("checkpoints", "notes", "my-model"))
        assert "no folder of a name like no-such-folder" in do(far)
    assert "did you mean my-model" in do("./my-modle")
    assert f"{tmp_path}/no/such does not exist" in do(f"{tmp_path}/no/such/folder")


# -- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*hub_access.VARIABLES, hub_access.DATA_VARIABLE, "SPECCTL_OFFLINE"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)

    def refuse(*given: object, **named: object) -> None:
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    return monkeypatch


def refused() -> NetworkError:
    with pytest.raises(NetworkError) as caught:
        folder_of(resolve("qwen3-8b"))
    return caught.value


@pytest.mark.parametrize("name", hub_access.VARIABLES)
def test_where_a_variable_forbids_the_hub_it_is_named(
    name: str, no_hub: pytest.MonkeyPatch, tiny_target: Target
) -> None:
    no_hub.setenv(name, "1")
    assert refused().do.startswith(f"unset {name} and give the same again")
    assert "--offline" not in refused().do
    with pytest.raises(NetworkError) as caught:
        specctl.load_drafter("some-owner/some-model", tiny_target)
    assert f"unset {name}" in caught.value.do


def test_the_flag_is_named_where_it_forbids_the_hub_and_both_where_both_do(
    no_hub: pytest.MonkeyPatch,
) -> None:
    hub_access.go_offline()
    assert refused().do.startswith("leave out --offline and give")
    assert hub_access.forbidden_by(is_data=True) == ["--offline"]
    no_hub.delenv("SPECCTL_OFFLINE")
    hub_access.go_offline()  # the variable was there before
    assert refused().do.startswith("leave out --offline and unset HF_HUB_OFFLINE and give")


def test_a_variable_that_is_off_forbids_nothing(no_hub: pytest.MonkeyPatch) -> None:
    no_hub.setenv("HF_HUB_OFFLINE", "0")
    assert hub_access.forbidden_by() == []
    assert refused().do.startswith("check the network")


# -- packages ------------------------------------------------------------------------------------


def test_a_newer_package_is_read_by_what_wrote_it_from_where_this_is_from(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(package, tmp_path / "newer")
    text = (folder / MANIFEST).read_text().replace('"format_version": 1', '"format_version": 2')
    other = text.replace(f'"specctl": "{specctl.__version__}"', '"specctl": "99.1"')
    for body, which in ((other, "specctl 99.1 or newer"), (text, "a newer specctl")):
        (folder / MANIFEST).write_text(body)
        with pytest.raises(IncompatibleError) as caught:
            read_manifest(folder)
        assert caught.value.do.startswith(f"install {which}")
        assert "--upgrade specctl-toolkit" not in caught.value.do  # no index has it


@pytest.mark.parametrize(
    ("about", "place"),
    [
        ('{"url": "file:///a%20b", "dir_info": {"editable": true}}', "pip install '/a b'"),
        ('{"url": "https://x/y.git", "vcs_info": {"vcs": "git"}}', "@ git+https://x/y.git'"),
        ('{"url": "file:///x/y.whl", "archive_info": {}}', "a checkout or a wheel"),
        (None, "a checkout or a wheel"),
    ],
)
def test_the_way_to_another_version_is_by_where_this_one_was_installed_from(
    about: str | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SimpleNamespace(value=installed.STARTS)
    points = SimpleNamespace(select=lambda **named: [script])
    ours = SimpleNamespace(name="ours", entry_points=points, read_text=lambda name: about)
    monkeypatch.setattr(installed, "distributions", lambda: iter([ours]))
    assert place in installed.way_to_newer()


def test_a_damaged_folder_is_not_offered(run: Any, package: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(package, tmp_path / "cut")
    assert any("generate" in line for line in run("show", folder, "--json").json["next"])
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    shown = run("show", folder, "--json").json
    assert shown["next"] == [f"specctl verify {folder} --level files"]
    assert "it cannot be used" in shown["warnings"][0]
    model = shutil.copytree(resolve("tiny").path or Path(), tmp_path / "model")
    assert run("show", model, "--json").json["next"]
    for body in (b"", whole[:400]):
        (model / WEIGHTS).write_bytes(body)
        shown = run("show", model, "--json").json
        assert shown["next"] == []
        assert "cannot be loaded" in shown["warnings"][0]
    (model / WEIGHTS).unlink()
    assert run("show", model, "--json").json["next"] == []


# -- what an export and a grammar need -------------------------------------------------------------


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Neither gguf nor llguidance is installed, nor (nowhere here) OpenVINO's converter."""
    for name in ("gguf", "llguidance"):
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


@pytest.mark.parametrize("to", ["llama.cpp", "gguf", "openvino"])
def test_a_drafter_that_an_engine_cannot_read_asks_for_no_extra(
    to: str, no_library: pytest.MonkeyPatch, tiny_target: Target, tmp_path: Path
) -> None:
    drafter = shaken("eagle3", tiny_target, fc_norm=True)
    folder = packaged(drafter, tiny_target, tmp_path / "package")
    with pytest.raises(IncompatibleError, match="fc_norm") as caught:
        specctl.export(folder, to, tmp_path / "out", target=tiny_target)
    assert "--to speculators" in caught.value.do
    assert "pip install" not in caught.value.do


def test_a_drafter_that_fits_says_what_is_to_be_installed(
    no_library: pytest.MonkeyPatch, package: Path, tiny_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(SpecctlError, match="needs the library gguf") as caught:
        specctl.export(package, "llama.cpp", tmp_path / "out", target=tiny_target)
    assert caught.value.do == installed.pip_install("gguf")


def test_a_request_for_a_grammar_is_refused_with_the_line_to_type(
    no_library: pytest.MonkeyPatch, tiny_target: Target
) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(GrammarSpec("regex", "a+"), tiny_target)
    answer = api_error(caught.value)
    assert answer.status_code == 400
    assert installed.pip_install("grammar") in answer.detail


# -- flags that exclude each other ---------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        (*G, "--adaptive", "--no-adaptive", "x"),
        ("plan", "--resume", "--no-resume"),
        (*G, "--quiet", "--verbose", "x"),
        (*G, "-q", "-v", "x"),
        ("-q", *G, "--verbose", "x"),
        (*G, "--json", "--jsonl", "x"),
        ("--jsonl", *G, "--json", "x"),
        ("recipes", "ls", "--quiet", "--verbose"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(words: tuple[str, ...], run: Any) -> None:
    if "plan" in words:
        words = ("train-draft", *words[1:])
    ran = run(*words)
    assert ran.code == 2
    assert "exclude each other" in ran.err


def test_a_flag_given_twice_the_same_way_excludes_nothing(run: Any) -> None:
    twice = ("--no-adaptive", "--no-adaptive", "--quiet", "-q", "--json")
    assert run(*G, "-d", "prompt-lookup", *twice, "x").code == 0


def test_what_is_typed_wins_over_its_opposite_in_a_file_of_defaults(
    run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "defaults.yaml"
    file.write_text("quiet: true\nadaptive: true\n")
    for words in ((*G, "-v"), ("--verbose", *G)):
        ran = run(*words, "--config-file", file, "--no-adaptive", "-d", "prompt-lookup", "x")
        assert (ran.code, "target tiny" in ran.err) == (0, True)
    file.write_text("quiet: true\nverbose: true\n")
    assert run(*G, "--config-file", file, "x").code == 2


# -- Python --------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, ...]] = {
    "temperature": ("hot", None, True, [1]),
    "top_k": ("x", [1], 1.5, True),
    "top_p": ("x", {}),
    "min_p": ("x",),
    "repetition_penalty": ("x",),
    "presence_penalty": ("x", 1j),
    "seed": ("x", 1.5, True),
    "max_new_tokens": ("many", 3.5, None, True),
    "stop": (3, [3], b"x"),
    "stop_token_ids": (3, ["x"], "12", [1.5]),
    "bad_words": (3, [3], ["ab"], [[]]),
    "logit_bias": (3, [1], {"a": 1.0}, {1: "x"}),
    "processors": (3, [3]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_setting_of_another_type_is_named(name: str, tiny_target: Target) -> None:
    for value in BAD[name]:
        with pytest.raises(SpecctlError, match=f"sampling setting {name} is not valid"):
            specctl.generate(tiny_target, "x", **{name: value})
        with pytest.raises(SpecctlError, match=name):
            Sampling(**{name: value})


def test_prompts_of_none_are_no_prompt(tiny_target: Target) -> None:
    with pytest.raises(SpecctlError, match="a prompt is no text"):
        specctl.generate(tiny_target, None)
