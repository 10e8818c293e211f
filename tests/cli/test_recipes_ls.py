"""`specctl recipes ls`: one screen of usual recipes, and what fits a target, with commands."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl.api.arguments.families import family_infos
from specctl.cli.app.console import Console
from specctl.cli.commands.pretrain import recipe_path
from specctl.recipes.files import PRETRAINED, recipe_names
from specctl.recipes.made_for import is_same, made_for
from specctl_testing.cli.next_lines import wrong_lines
from specctl_testing.cli.ran import Run

SCREEN = 24  # lines, of which the last says what comes next
TIMED = " --time 40m"


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A terminal of 80 columns, a folder without runs, no models, no network."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"the network: {arguments}")

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def commands(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("    specctl ")]


def test_the_list_is_one_screen_with_counts_of_all(run: Run) -> None:
    ran = run("recipes", "ls")
    lines = ran.out.splitlines()
    assert len(lines) + len(ran.err.splitlines()) <= SCREEN
    assert max(map(len, lines)) <= 80
    for name in ("auto", "distill", "eagle3", "quickstart"):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert f"{len(recipe_names())} recipes:" in ran.out
    assert f"llama3-8b {len(made_for('llama3-8b'))}" in ran.out
    counts = [int(line.split(": ")[1].split(" ")[0]) for line in lines if line.startswith("  ")
              and ": " in line]  # fmt: skip
    assert sum(counts) == len(recipe_names())


def test_a_pipe_gets_the_same_screen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    at_80 = run("recipes", "ls").out
    monkeypatch.delenv("COLUMNS")
    assert run("recipes", "ls").out == at_80


def test_all_lists_every_recipe_and_json_does_without_it(run: Run) -> None:
    whole = run("recipes", "ls", "--all").out
    rows = run("recipes", "ls", "--json").json["result"]["recipes"]
    assert sorted(row["name"] for row in rows) == recipe_names()
    assert set(rows[0]) == {"name", "family", "target", "summary", "paper", "group"}
    named = {word for line in whole.splitlines() for word in line.split()[:1]}
    assert set(recipe_names()) <= named
    assert run("recipes", "ls", "--all", "--json").json["result"]["recipes"] == rows


def test_recipes_of_pretrain_are_listed_apart_shown_and_copied(run: Run, tmp_path: Path) -> None:
    listed = run("recipes", "ls", "--all", "--json").json["result"]["pretraining"]
    assert [row["name"] for row in listed] == [*PRETRAINED]
    *_, apart = run("recipes", "ls", "--search", "pretrain").out.split("of specctl pretrain:")
    assert {line.split()[0] for line in apart.splitlines() if line} >= {*PRETRAINED}
    for name in PRETRAINED:
        shown = run("recipes", "show", name, "--json")
        assert shown.code == 0, shown.err
        result, (following,) = shown.json["result"], shown.json["next"]
        assert following.startswith(f"specctl pretrain --recipe {name} --out runs/tiny")
        assert result["summary"][-1] == "."
        assert "specctl generate --target" not in result["summary"]
        assert recipe_path(name).read_text() == result["text"]
        assert yaml.safe_load(result["text"]) == result["recipe"]
    shapes = run("recipes", "show", "tiny-shapes-qwen2-vl").out
    assert "qwen2-vl" in next(line for line in shapes.splitlines() if "shapes.layout" in line)
    assert "LLaVA" not in shapes
    file = tmp_path / "own.yaml"
    assert "pretrain" in run("recipes", "cp", "tiny-shapes", file, "--json").json["next"][0]
    assert file.read_text() == recipe_path("tiny-shapes").read_text()
    assert "recipes cp" in run("recipes", "show", "tiny-shapes", "--set", "train.steps=1").err
    assert "specctl pretrain --recipe tiny-shapes" in run("recipes", "validate", "tiny-shapes").err


@pytest.mark.parametrize("target", ["llama3-8b", "qwen3-8b", "qwen3-4b", "tiny", "some/model"])
def test_what_fits_a_target_is_one_screen_of_commands(target: str, run: Run) -> None:
    ran = run("recipes", "ls", "--target", target)
    lines = ran.out.splitlines()
    assert len(lines) + len(ran.err.splitlines()) <= SCREEN
    assert max(len(line) for line in lines if "    specctl " not in line) <= 80
    assert "--draft prompt-lookup" in ran.out
    assert len(commands(ran.out)) >= 5


@pytest.mark.parametrize("target", ["llama3-8b", "tiny", "llama3.1-8b", "a/b:Q4_K_M"])
def test_every_command_can_be_pasted(target: str, run: Run) -> None:
    found = commands(run("recipes", "ls", "--target", target, "--all").out)
    assert len(found) == len(set(found)) > 20
    assert wrong_lines([line.removesuffix(TIMED) for line in found if "runs/" not in line]) == []


def test_recipes_made_for_the_target_come_first_the_usual_choice_before_others(run: Run) -> None:
    result = run("recipes", "ls", "--target", "Qwen/Qwen3-8B", "--json").json["result"]
    made = [choice["name"] for choice in result["made_for"]]
    assert made[:2] == ["qwen3-8b-eagle3", "qwen3-8b-distill"]
    assert made == made_for("qwen3-8b")
    assert {row["name"] for row in result["recipes"]} == set(made)
    command = "specctl train-draft --recipe qwen3-8b-eagle3 --data chats.jsonl"
    assert result["made_for"][0]["command"] == command
    out = run("recipes", "ls", "--target", "Qwen/Qwen3-8B").out
    assert out.index(command) < out.index("--draft auto") < out.index("--recipe eagle3")


def test_a_target_without_recipes_gets_drafts_and_methods(run: Run) -> None:
    out = run("recipes", "ls", "--target", "qwen3-4b").out
    assert "No recipe was made for qwen3-4b." in out
    assert 'specctl generate --target qwen3-4b --draft qwen3-0.6b --compare "..."' in out
    methods = [line for line in commands(out) if line.startswith("specctl train-draft")]
    timed = "specctl train-draft --target qwen3-4b --recipe {} --data chats.jsonl --time 40m"
    assert methods[:2] == [timed.format("eagle3"), timed.format("distill")]
    assert "their numbers fit the embedded target, --time derives yours" in out


def test_a_gguf_file_is_offered_nothing_that_reads_other_weights(run: Run, tiny_gguf: Path) -> None:
    result = run("recipes", "ls", "--target", tiny_gguf, "--json").json["result"]
    names = {choice["name"] for choice in result["no_training"]}
    assert "prompt-lookup" in names
    assert "quantspec" not in names


def test_a_target_with_recurrent_layers_is_offered_what_it_does_not_refuse(
    run: Run, tmp_path: Path
) -> None:
    kinds = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
    config = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], **kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("recipes", "ls", "--target", tmp_path, "--json").json["result"]
    free = {choice["name"] for choice in result["no_training"]}
    methods = {choice["name"] for choice in result["methods"]}
    assert {"prompt-lookup", "token-recycling"} <= free
    assert {"eagle3", "medusa", "distill"} <= methods
    borrowing = {name for name, info in family_infos().items() if info.borrows_layers}
    assert len(borrowing) > 10
    assert not borrowing & (free | methods)


def test_no_draft_without_training_has_options_of_the_embedded_target(run: Run) -> None:
    result = run("recipes", "ls", "--target", "some/model", "--json").json["result"]
    names = {choice["name"] for choice in result["no_training"]}
    assert {"auto", "swift", "layer-skip"} <= names
    assert not {"calm-alone", "skip-decode", "free", "draft-verify"} & names


@pytest.mark.parametrize("name", ["./none", "none.gguf", "qwen3-8"])
def test_a_target_that_is_not_there_is_refused_as_by_other_commands(name: str, run: Run) -> None:
    listed = run("recipes", "ls", "--target", name, "--json")
    other = run("plan", "--target", name, "--json")
    assert listed.code == other.code != 0
    assert listed.json["error"] == other.json["error"]


def test_a_folder_without_a_model_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = run("recipes", "ls", "--target", "./empty")
    assert ran.code == 4
    assert "no config.json" in ran.err


def test_a_folder_called_like_an_owner_hides_no_recipe(run: Run, tmp_path: Path) -> None:
    (tmp_path / "openai").mkdir()
    assert not is_same("llama3-8b", "openai/gpt-oss-20b")
    assert run("recipes", "ls", "--target", "llama3-8b").code == 0


def test_a_filter_beside_a_target_lists_its_recipes(run: Run) -> None:
    words = ("recipes", "ls", "--target", "llama3-8b", "--family", "medusa")
    assert "specctl train-draft" not in run(*words).out
    rows = run(*words, "--json").json["result"]["recipes"]
    assert {(row["target"], row["family"]) for row in rows} == {("llama3-8b", "medusa")}
    assert run("recipes", "ls", "--search", "no such word").out == "no recipe is like that\n"


def test_a_text_is_cut_behind_a_word() -> None:
    console = Console(io.StringIO(), io.StringIO())
    assert console.cut("a self-made summary", 40) == "a self-made summary"
    assert console.cut("a self-made summary", 18) == "a self-made…"
    assert console.cut("a self-made summary", 9) == "a…"
    plain = Console(io.TextIOWrapper(io.BytesIO(), encoding="ascii"), io.StringIO())
    assert plain.cut("a self-made summary", 18) == "a self-made..."
