"""`Next:` lines run as printed: folders with blanks, from another folder, with the flags before."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import specctl.recipes
from specctl.cli.app.command import SET, settings_of
from specctl.cli.app.follow_up import command_line, noted
from specctl.cli.commands.bench import _next
from specctl.cli.options.loading import DraftingFlags
from specctl.cli.options.recipe_flags import PlanFlags
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import Exit
from specctl.drafters import family
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import read_manifest
from specctl.runtime.measure.bench_report import BenchReport, BenchRow
from specctl.runtime.target.target import load_target
from specctl_testing.cli.commands import parsed
from specctl_testing.cli.next_lines import wrong_lines
from specctl_testing.cli.ran import Ran, Run

PACKAGE = Path("my runs/a b/package")


@pytest.fixture
def place(make_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a small target in "my models/hf" and a package made for it there,
    the target named as it is from here."""
    monkeypatch.chdir(tmp_path)
    model = make_model(num_layers=1, vocab=6144, max_position_embeddings=256, eos_token_id=1)
    model.save_pretrained("my models/hf")
    tiny = Path(specctl.recipes.__path__[0]) / "tiny"
    AutoTokenizer.from_pretrained(tiny).save_pretrained("my models/hf")
    target, entry = load_target("my models/hf"), family("small-lm")
    options = entry.options(layers=1, width=16, heads=2, head_dim=8)
    serve, made = {"policy": "chain", "length": 2}, ["specctl", "distill"]
    drafter = entry.build(options, target.spec, None)
    PACKAGE.parent.mkdir(parents=True)
    save_package(
        drafter, target, PACKAGE, serve=serve, recipe_digest="0" * 64, acceptance=None, command=made
    )
    return tmp_path


def lines(ran: Ran) -> list[str]:
    """The commands that were printed."""
    assert ran.code == 0, ran.err
    marked = "Next: "
    return [line.removeprefix(marked) for line in ran.err.splitlines() if line.startswith(marked)]


def typed(run: Run, line: str, *more: object) -> Ran:
    """The line as a shell takes it apart; what is printed is asked to be short."""
    words = shlex.split(line, comments=True)
    assert words[0] == "specctl"
    return run(*words[1:], *more)


def test_a_package_is_verified_and_its_next_line_runs_from_another_folder(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert read_manifest(PACKAGE).target.name == str(place / "my models" / "hf")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    package, few = place / PACKAGE, ("--max-new-tokens", 4)
    (line,) = lines(run("verify", package, "--level", "files"))
    assert line == f"specctl generate --draft '{package}' --compare \"...\""
    assert typed(run, line, *few).code == 0
    target = place / "my models" / "hf"
    flags = ("--target", target, "--dtype", "bfloat16", "--allow", "template")
    (line,) = lines(run("verify", package, "--level", "compat", *flags))
    assert f"--target '{target}' --dtype bfloat16 --draft" in line
    assert "--allow template" in line
    (next_one,) = lines(typed(run, line, *few))
    assert next_one.startswith(f"specctl bench --target '{target}' --dtype bfloat16")
    assert next_one.endswith("--allow template")


def test_looking_at_things_names_them_as_a_shell_takes_them(run: Run, place: Path) -> None:
    (line,) = lines(run("show", "my models/hf"))
    assert "--target 'my models/hf'" in line
    assert typed(run, line, "--max-new-tokens", 2).code == 0
    verify, generate = lines(run("show", PACKAGE))
    assert typed(run, verify, "--level", "files").code == 0
    assert typed(run, generate, "--max-new-tokens", 2).code == 0
    (validate,) = lines(run("recipes", "cp", "eagle3", "my e.yaml"))
    (plan,) = lines(typed(run, validate, "--set", "train.steps=7"))
    assert plan == "specctl plan --recipe 'my e.yaml' --set train.steps=7"
    (line,) = lines(run("recipes", "show", "my e.yaml", "--set", "train.steps=7"))
    assert line.endswith("--recipe 'my e.yaml' --out 'runs/my e' --set train.steps=7")
    (line,) = lines(run("recipes", "validate", "prompt-lookup"))
    assert line.startswith("specctl generate --target tiny --draft prompt-lookup")
    train, trim = lines(run("recipes", "show", "fr-spec"))
    assert train == "specctl train-draft --recipe distill --out runs/distill"
    assert trim.startswith("specctl vocab-trim --draft runs/distill/package")


def test_every_recipe_names_a_command_that_can_be_given(run: Run) -> None:
    from specctl.recipes.files import recipe_names

    names = ["auto", "calm", "adapt", "scaling", "quickstart", "qwen3-8b-eagle3", "medusa-2"]
    assert {*names} <= {*recipe_names()}
    for name in names:
        assert lines(run("recipes", "show", name)), name  # the suite's fixture reads each


def test_a_plan_goes_on_with_all_that_was_planned(run: Run, place: Path) -> None:
    chats = place / "my chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    words = ["--target", "my models/hf", "--recipe", "eagle3", "--data", "my chats.jsonl"]
    words += ["--steps", 7, "--set", "serve.length=3", "--set", "train.seq_len=64", "--out", "a b"]
    (line,) = lines(run("plan", *words))
    assert line.startswith("specctl train-draft --recipe eagle3 --target 'my models/hf'")
    (again,) = lines(typed(run, line, "--dry-run"))
    assert again.startswith("specctl train-draft --recipe eagle3 --target 'my models/hf'")
    asked = parsed(["train-draft", *map(str, words)]).params
    assert parsed(shlex.split(line)[1:]).params == asked


def test_the_flags_of_a_group_are_read_again_as_they_were_given() -> None:
    def again(command: str, group: Any, words: Sequence[str], name: str) -> None:
        context = parsed([command, *words])
        is_set = settings_of(context.command).defaults() | context.meta.get(SET, {})
        read = context.params | is_set
        for field in fields(group):
            found, wanted = read[f"{name}_{field.name}"], getattr(group, field.name)
            assert (list(found) if isinstance(found, tuple) else found) == wanted, field.name

    plan = PlanFlags(
        "eagle3", "my t", ["a b", "c"], ["x@.5"], "auto", "http://a", Path("o p"), "r d",
        ["k=[1, 2]"], 0.5, 3, "cpu", 9,
    )  # fmt: skip
    again("plan", plan, plan.words(), "run")
    target = TargetChoice("my t", "abc", "int8", "cpu", "300m", True, ["a b@2"], "auto", True)
    again("bench", target, target.words(), "target")
    drafting = DraftingFlags(
        policy="chain", length=2, nodes=3, rule="block", stop_rule="s p.x", controller="hedge",
        parallel=False, adaptive=True, allow=["a", "b"], translate="tli",
        draft_options=["window=9"],
    )  # fmt: skip
    again("bench", drafting, drafting.words(), "drafting")
    assert OWN_TARGET.words() == []
    words = target.training_words()
    assert words[:2] == ["--target", "my t"]
    assert "target.inflate=300m" in words
    assert replace(target, tensor_parallel=False).measured_words() == target.measured_words()


def test_what_was_not_found_is_said_of_the_package(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "my models").rename(place / "moved")
    ran = run("generate", PACKAGE, "x", "--json")
    assert ran.code == Exit.FILE
    error = ran.json["error"]
    assert "the package was made for" in error["what"]
    assert str(PACKAGE) in error["where"]
    assert "recipe" not in json.dumps(error)
    assert "--target" in error["do"]
    named = ("--target", "moved/hf", "--max-new-tokens", 2)
    assert run("generate", *named, PACKAGE, "x").code == 0


def row(name: str, speedup: float) -> BenchRow:
    return BenchRow(name, "greedy", 2.0, 10.0, speedup, 0.0, True, 0.1, ())


def report(*rows: BenchRow) -> BenchReport:
    return BenchReport(rows, "my t", None, "float32", "cpu", 1, 1, 4, 64, 1)


def test_a_benchmark_names_a_drafter_of_ours_or_how_to_train_one() -> None:
    rows = [row("plain", 1.0), row("runs/a b", 1.2), row("transformers with runs/a b", 9.0)]
    target, drafting = TargetChoice("my t"), DraftingFlags(allow=["template"])
    fast = _next(report(*rows), ["runs/a b"], target, drafting)
    assert fast == ("specctl generate --target 'my t' --draft 'runs/a b' --allow template \"...\"")
    others = report(rows[0], row("runs/a b", 0.9), rows[2])
    slow = _next(others, ["runs/a b"], target, drafting)
    assert slow == "specctl train-draft --target 'my t' --recipe distill"
    open_ = report(rows[0], replace(rows[1], doubts=("few tokens",)))
    again = _next(open_, ["runs/a b"], target, DraftingFlags(nodes=3))
    assert "'runs/a b' --set serve.nodes=3 --num-prompts" in again


def test_remarks_are_no_part_of_a_command() -> None:
    assert shlex.split(noted(command_line("show", "a b"), "as it (is)"), comments=True) == [
        "specctl", "show", "a b"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "specctl generate --target hf --compare x",
        "specctl bench transformers with prompt-lookup",
        "specctl train-draft --recipe no-such",
        "specctl show it's",
        "specctl plan --no-such-flag",
        "specctl runs resume no/such",
    ],
)
def test_a_line_that_would_fail_is_seen(line: str) -> None:
    assert wrong_lines([line])
