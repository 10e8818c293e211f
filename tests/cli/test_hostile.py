"""Absurd numbers, flags that do not go together, places that cannot be written: refused at once,
by a dry run as by the run itself."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from specctl.api.arguments.outputs import check_file
from specctl.cli.app.command import command
from specctl.cli.main import COMMANDS, load_command
from specctl.drafters import families
from specctl.export.package.folder import save_package
from specctl.recipes.schema import InflateName
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.inflate import SIZES
from specctl_testing.cli import commands

FASTDRAFT = ("train-draft", "-r", "fastdraft", "--dry-run")
ABSURD = {int: ("9" * 30,), float: ("nan", "inf")}


def leaves() -> Iterator[tuple[str, Any, Callable[..., None]]]:
    """Every command: the words that call it, its parameters, and the function behind it."""
    for name, entry in COMMANDS.items():
        module = importlib.import_module(f"specctl.cli.commands.{entry.module}")
        if hasattr(module, "app"):
            for leaf in module.app.registered_commands:
                below = load_command(name).commands[leaf.name]
                yield f"{name} {leaf.name}", below.params, leaf.callback
        else:
            yield name, load_command(name).params, command(getattr(module, entry.module))


def absurd(annotation: Any) -> tuple[str, ...]:
    """What no flag of that type may take; nothing for flags that take no numbers."""
    kind = get_args(annotation)[0] if get_args(annotation) else annotation
    kinds = {kind, *get_args(kind), *(part for one in get_args(kind) for part in get_args(one))}
    return next((words for number, words in ABSURD.items() if number in kinds), ())


def test_no_command_takes_an_absurd_number(run: Any) -> None:
    asked = 0
    for words, parameters, function in leaves():
        kinds = inspect.signature(function).parameters
        needed = [p.opts[0] for p in parameters if p.required]
        given = [w for flag in needed for w in ((flag, "x") if flag[0] == "-" else ("x",))]
        for parameter in parameters:
            if parameter.name not in kinds:
                continue
            flag = parameter.opts[0]
            for number in absurd(kinds[parameter.name].annotation):
                ran = run(*words.split(), *given, f"{flag}={number}", "--json")
                what = ran.json["error"]["what"]
                assert (ran.code, what.startswith(f"Invalid value for '{flag}'")) == (2, True), what
                asked += 1
    assert asked > 70


REFUSED = {
    # a dry run and a plan refuse what the run would
    "a dry run on more GPUs than there are": (("train-draft", "--dry-run", "--gpus", "64"), 6),
    "a dry run on too many processes": (("distill", "--dry-run", "--processes", "17"), 3),
    "a dry run on too many processes for one of its stages": (
        (*FASTDRAFT, "--processes", "4", "--set", "stages.align.train.rows=2"),
        3,
    ),
    "a dry run on GPUs and processes": (
        ("train-draft", "--dry-run", "--gpus", "2", "--processes", "2"),
        2,
    ),
    "a dry run without its data": (("train-draft", "--dry-run", "--data", "no.jsonl"), 4),
    "a rehearsal without its data": (("plan", "--rehearse", "--data", "no.jsonl"), 4),
    "a cut without its data": (("prune", "--dry-run", "--data", "no.jsonl"), 4),
    "a dry run into a file": (("train-draft", "--dry-run", "--out", "FILE"), 4),
    "a plan below a file": (("plan", "--out", "FILE/run"), 4),
    "a dry run from a drafter that is nowhere": (("train-draft", "--dry-run", "--init", "no"), 4),
    "a reference that is nowhere": (
        ("distill", "--dry-run", "--select", "highest", "--reference", "./no"),
        4,
    ),
    "an allowance of nothing": (("train-draft", "--dry-run", "--allow", "taregt"), 2),
    "a rehearsal of a grid": (("plan", "--rehearse", "--scaling"), 2),
    "a search's flag without a search": (("prune", "--dry-run", "--depths", "1"), 3),
    # numbers of a recipe
    "too many steps": (("plan", "--set", "train.steps=99999999999999999999"), 3),
    "too many rows": (("plan", "--set", "train.rows=99999999999999999999"), 3),
    "too many prompts": (("plan", "--set", "data.prompts=99999999999999999999"), 3),
    "too large a seed": (("plan", "--set", "train.seed=99999999999999999999"), 3),
    "a seed below nothing": (("plan", "--set", "data.seed=-1"), 3),
    "too many layers": (("plan", "--set", "drafter.options.layers=99999999999999999999"), 3),
    "many layers": (("plan", "--set", "drafter.options.layers=100000"), 3),
    "too many heads": (("plan", "-r", "medusa", "--set", "drafter.options.num_heads=999999"), 3),
    "layers that the target has not": (
        ("plan", "--set", "drafter.options.from_layers=[0,99]"),
        3,
    ),
    "steps that are a switch": (("plan", "--set", "train.steps=true"), 3),
    "a name as a number of heads": (("plan", "--set", "drafter.options.heads=abc"), 3),
    "half a layer": (("plan", "--set", "drafter.options.layers=1.5"), 3),
    "too long a training-time test": (
        ("plan", "-r", "eagle3", "--set", "drafter.options.ttt_steps=999999"),
        3,
    ),
    "an infinite option": (("plan", "--set", "drafter.options.temperature=.inf"), 3),
    "an infinite option in a word": (("plan", "--set", "drafter.options.temperature=inf"), 3),
    "distributions at no temperature": (("plan", "--set", "drafter.options.temperature=0"), 3),
    "heads of negative weight": (("plan", "-r", "medusa", "--set", "drafter.options.decay=-1"), 3),
    "slices of nothing": (("plan", "-r", "eagle3", "--set", "drafter.options.chunk=0"), 3),
    "too large a vocabulary": (("plan", "--set", "vocab.size=99999999999999999999"), 3),
    "an unknown size of target": (("plan", "--set", "target.inflate=77b"), 3),
    "heads that are a switch": (
        ("plan", "-r", "medusa", "--set", "drafter.options.num_heads=true"),
        3,
    ),
    "heads as a word": (("plan", "-r", "medusa", "--set", "drafter.options.num_heads='2'"), 3),
    "a tree without end": (
        ("plan", "--set", "serve.policy=static-tree", "--set", "serve.branch=[64,64,64,64]"),
        3,
    ),
    "a stop file, which no package has": (
        ("plan", "--set", "serve.stop=disco", "--set", "serve.stop_file=x.safetensors"),
        3,
    ),
    # late failures, early
    "a benchmark into a folder": (("bench", "--out", "FOLDER"), 4),
    "a benchmark below a file": (("bench", "--out", "FILE/x.json"), 4),
    "a report into a folder": (("verify", "prompt-lookup", "--out", "FOLDER"), 4),
    "a quickstart below a file": (("quickstart", "--out", "FILE/x"), 4),
    "a quickstart at an unknown cost": (("quickstart", "--inflate", "77b"), 2),
    "prompts that are a folder": (("bench", "--prompts", "FOLDER"), 4),
    "prompts that are no text": (("bench", "--prompts", "BINARY"), 4),
    "a stop rule into a folder": (("train-stop", "-d", "x", "--out", "FOLDER"), 4),
    "a stop rule of what drafts at once": (("train-stop", "-d", "prompt-lookup"), 5),
    "an unknown translation": (
        ("generate", "-d", "prompt-lookup", "--set", "drafter.translate=tly", "x"),
        3,
    ),
    "a window of a drafter without": (
        ("generate", "-d", "prompt-lookup", "--set", "drafter.options.window=9", "x"),
        3,
    ),
    "an option without a value": (
        ("generate", "-d", "prompt-lookup", "--set", "drafter.options.window", "x"),
        3,
    ),
    "a schema that is nowhere": (("generate", "--grammar", "no.json", "x"), 4),
    "a schema that is no JSON": (("generate", "--grammar", "FILE", "x"), 2),
    "a trimming to one token": (("vocab-trim", "-d", "FOLDER", "-o", "NEW", "--size", "1"), 3),
    "a trimming to all too many": (
        ("vocab-trim", "-d", "FOLDER", "-o", "NEW", "--size", "9999k"),
        3,
    ),
    "a trimming by no data": (("vocab-trim", "-d", "x", "-o", "NEW", "--data", "no.txt"), 4),
    "additions of absurd rank": (("plan", "-r", "adapt", "--set", "train.lora.rank=99999"), 3),
    "a trimming into a file": (("vocab-trim", "-d", "x", "--out", "FILE"), 4),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_work_is_refused_before_anything_is_spent(
    name: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("x")
    Path("BINARY").write_bytes(b"\x7fELF\xff\xfe\x00")
    Path("FOLDER").mkdir()
    words, code = REFUSED[name]
    ran = run(*words, "--json")
    error = ran.json["error"]
    assert ran.code == error["code"] == code, error
    assert error["what"]
    assert error["found"], error
    assert error["expected"], error
    assert error["do"], error
    if error["do"].startswith("specctl "):
        assert commands.why_not(commands.program_words(error["do"])) is None, error["do"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BINARY", "FILE", "FOLDER"]


def test_a_stage_of_many_rows_may_have_many_processes(run: Any) -> None:
    stages = ("pretrain", "continue", "align")
    rows = [word for stage in stages for word in ("--set", f"stages.{stage}.train.rows=16")]
    assert run(*FASTDRAFT, "--processes", "16", *rows).code == 0


def test_a_file_that_is_there_may_be_written_although_its_folder_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "report.json"
    there.write_text("")
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) == there)
    check_file(there)
    with pytest.raises(PermissionError):
        check_file(tmp_path / "other.json")


def test_recipes_and_the_runtime_know_the_same_sizes() -> None:
    assert get_args(InflateName) == (*SIZES,)


def test_a_plan_without_its_data_warns_that_the_run_will_need_them(run: Any) -> None:
    ran = run("plan", "--data", "no.jsonl", "--json")
    assert ran.code == 0
    assert any("no.jsonl" in warning for warning in ran.json["warnings"])


def test_a_damaged_package_is_refused_by_a_dry_run_and_shown_with_a_warning(
    run: Any, tmp_path: Path, tiny_target: Target
) -> None:
    family, folder = families()["small-lm"], tmp_path / "package"
    drafter = family.build(family.options(layers=1, width=64), tiny_target.spec, None)
    about: dict[str, Any] = {"serve": {}, "recipe_digest": "0" * 64, "acceptance": None}
    save_package(drafter, tiny_target, folder, **about, command=["x"])
    words = ("distill", "--dry-run", "--from", folder, "--json")
    assert run(*words).code == 0
    assert run("show", folder, "--json").json["warnings"] == []
    weights = folder / "model.safetensors"
    body = weights.read_bytes()
    weights.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert run(*words).code == 7
    weights.unlink()
    (warning,) = run("show", folder, "--json").json["warnings"]
    assert "model.safetensors" in warning
