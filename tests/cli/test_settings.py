"""--set KEY=VALUE: typed, checked before anything loads, written again as it was typed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from specctl.cli.app.command import REPEATED, SET
from specctl.cli.app.settings import Setting, Settings
from specctl.cli.main import app, load_command
from specctl.cli.options.loading import DraftingFlags
from specctl.cli.options.recipe_fields import complete_field, schema_fields
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.errors import RecipeError
from specctl.recipes.schema import section_at

KINDS = {
    "count": (Annotated[int | None, Setting("a.count", "C.", was="--count", min=1, max=9)], None),
    "share": (Annotated[float, Setting("a.share", "S.", min=0)], 0.5),
    "on": (Annotated[bool, Setting("a.on", "O.", was="--on/--no-on")], True),
    "penalty": (Annotated[float, Setting("d.penalty", "F.")], 0.0),
    "place": (Annotated[Path | None, Setting("b.place", "P.")], None),
    "names": (Annotated[list[str] | None, Setting("b.names", "N.")], None),
    "more": (Annotated[list[str] | None, Setting("c.", "M.", was="--more")], None),
}
PARAMETERS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    for name, (kind, default) in KINDS.items()
]
SETTINGS = Settings(PARAMETERS)
FLAGS = {"length": "--length VALUE", "adaptive": "--adaptive or --no-adaptive"}


def read(*words: str) -> dict[str, Any]:
    return SETTINGS.read(words, "specctl x", FLAGS)


def test_values_have_the_kinds_of_their_settings() -> None:
    found = read("a.count=4", "a.share=1e-1", "a.on=no", "b.place=x y", "b.names=[/A]", "b.names=b")
    assert found == {
        "count": 4, "share": 0.1, "on": False, "place": Path("x y"), "names": ["[/A]", "b"],
    }  # fmt: skip
    assert read("c.window=512", "c.sink=a=b") == {"more": ["window=512", "sink=a=b"]}
    assert read("b.names= x\n", "b.names=\n") == {"names": [" x\n", "\n"]}  # a text is what it is
    assert read("a.share=null", "b.names=null") == {"share": 0.5, "names": ["null"]}


@pytest.mark.parametrize(
    ("word", "what", "do"),
    [
        ("a.count=10", "from 1 to 9", "specctl x --help-all"),
        ("a.count=2.5", "a whole number from 1 to 9", "specctl x --help-all"),
        ("a.share=nan", "a number from 0 to", "specctl x --help-all"),
        ("a.share=1e12", "a number from 0 to 1,000,000,000", "specctl x --help-all"),
        ("d.penalty=-1e12", "a number from -1,000,000,000", "specctl x --help-all"),
        ("a.on=perhaps", "true or false", "specctl x --help-all"),
        ("a.cout=1", "unknown setting 'a.cout'", "write a.count instead"),
        ("count=1", "unknown setting 'count'", "write a.count instead"),
        ("serve.length=4 5", "serve.length is a flag of its own", "--length '4 5'"),
        ("serve.adaptive=false", "is a flag of its own", "--adaptive or --no-adaptive"),
        ("serve.num_speculative_tokens=4", "serve.num_spec", "--length 4"),
        ("sample.leng=4", "unknown setting", "--length 4"),
        ("c.=1", "unknown setting", ""),
        ("limits.memory=3", "unknown setting", "specctl x --help-all"),
        ("=3", "sets nothing", "--set serve.nodes=VALUE"),
        (" a.count=1", "unknown setting", "write a.count instead"),
        ("a.count", "sets nothing", "--set a.count=VALUE"),
        ("a.count=", "sets nothing", "--set a.count=VALUE"),
    ],
)
def test_what_cannot_be_set_is_refused(word: str, what: str, do: str) -> None:
    with pytest.raises(RecipeError) as refused:
        read(word)
    assert what in str(refused.value)
    assert do in refused.value.do


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert read("b.place=~/keys.txt") == {"place": Path("/h/keys.txt")}
    found = _context("serve", "--set", "serve.stop=~/s.safetensors").meta[SET]
    assert found == {"draft_stop_rule": "/h/s.safetensors"}


def test_groups_write_their_settings_as_they_are_typed() -> None:
    flags = DraftingFlags(policy="chain", nodes=9, parallel=False, draft_options=["window=4"])
    assert flags.words() == [
        "--set", "serve.policy=chain", "--set", "serve.nodes=9", "--set", "serve.parallel=false",
        "--set", "drafter.options.window=4",
    ]  # fmt: skip
    target = TargetChoice("tiny", adapter=["a", "b@2"], device_map="auto", tensor_parallel=True)
    assert target.words() == [
        "--target", "tiny", "--adapter", "a", "--adapter", "b@2",
        "--set", "target.device_map=auto", "--set", "target.tensor_parallel=true",
    ]  # fmt: skip
    assert target.training_words()[2:] == [
        "--adapter", "a", "--adapter", "b@2", "--device-map", "auto",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["serve", "generate", "chat", "bench", "verify", "export"])
def test_every_old_flag_of_a_setting_is_free_and_leads_to_it(name: str) -> None:
    command = load_command(name)
    settings: Settings = command.callback.settings
    flags = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    olds = [p.annotation.__metadata__[0].was for _, p in settings._all.values()]
    olds = [old for old in olds if old]  # settings of diffusion models never were flags
    was = [flag for old in olds for flag in old.split("/")]
    assert len(set(was)) == len(was) >= len(olds) > 0
    assert not flags & set(was)
    assert all(settings.instead_of(flag).startswith("--set ") for flag in was)


def test_a_file_of_defaults_sets_what_is_not_typed(tmp_path: Path) -> None:
    file = tmp_path / "specctl.yaml"
    file.write_text("generate: {set: [sample.top_k=4, serve.nodes=5, sample.stop=a]}\n")

    def given(*words: str) -> Any:
        return _context("generate", "--config-file", str(file), *words).meta[SET]

    assert given("x") == {"sampling_top_k": 4, "draft_nodes": 5, "sampling_stop": ["a"]}
    typed = given("--set", "serve.nodes=7", "--set", "sample.stop=b", "x")
    assert typed == {"sampling_top_k": 4, "draft_nodes": 7, "sampling_stop": ["b"]}


def test_a_set_for_every_command_leaves_out_what_is_for_recipes(tmp_path: Path) -> None:
    file = tmp_path / "specctl.yaml"
    file.write_text("set: [train.steps=43, serve.nodes=5]\n")
    assert _context("generate", "--config-file", str(file), "x").meta[SET] == {"draft_nodes": 5}


def test_sets_of_a_file_and_typed_ones_are_joined_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "specctl.yaml"
    file.write_text(
        "set: [serve.nodes=5, sample.stop=a, drafter.options.a=1]\n"
        "generate: {set: [serve.nodes=6, sample.top_k=4]}\n"
        "chat: {set: serve.nodes=7}\n"
    )
    words = ["--config-file", str(file)]
    found = _context("generate", *words, "--set", "drafter.options.b=2", "x")
    assert found.meta[SET] == {
        "draft_nodes": 6, "sampling_stop": ["a"], "sampling_top_k": 4,
        "draft_draft_options": ["a=1", "b=2"],
    }  # fmt: skip
    assert not found.meta[REPEATED]
    assert _context("chat", *words).meta[SET]["draft_nodes"] == 7


def test_a_flag_in_a_file_that_is_a_setting_now_is_refused_with_it(
    run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "specctl.yaml"
    elsewhere = ", or top-p below the commands that have that flag"  # such as regenerate
    for command, text, do in (
        ("generate", "generate: {top-p: 0.9}", "[sample.top_p=0.9] instead of top-p"),
        ("generate", "top-p: 0.9", f"[sample.top_p=0.9] instead of top-p{elsewhere}"),
        ("generate", "generate: {stop: [a b, c]}", "['sample.stop=a b', sample.stop=c] instead"),
        ("generate", "generate: {top-p: }", "[sample.top_p=VALUE] instead of top-p"),
        ("doctor", "compile: false", "[target.compile=false] instead of compile"),
        ("serve", "serve: {reasoning: true}", "[api.reasoning=true] instead of reasoning"),
    ):
        file.write_text(text)
        ran = run(command, "--config-file", file, "--json")
        assert ran.code == 3
        assert ran.json["error"]["do"].startswith(f"write set: {do}")


def test_the_shell_completes_what_can_be_set() -> None:
    from specctl.diffusion.settings import REUSE, UNMASK
    from specctl.runtime.cross_vocab.translate import METHODS
    from specctl.runtime.outline.answer import GRAPH, SKELETON
    from specctl.runtime.target.placement.placement import MODES

    found: Settings = load_command("generate").callback.settings
    for key, names in (
        ("drafter.translate", {*METHODS, "none"}),
        ("target.device_map", {*MODES}),
        ("outline.kind", {SKELETON, GRAPH}),
        ("diffusion.unmask", {*UNMASK}),
        ("diffusion.reuse", {*REUSE}),
        ("sample.generation_config", {"model", "none"}),
        ("sample.ignore_eos", {"true", "false"}),
    ):
        values = [word.removeprefix(f"{key}=") for word in found.complete(f"{key}=")]
        assert {value.rstrip(":") for value in values} == names
    assert found.complete("drafter.options.") == ["drafter.options."]
    assert found.complete("sample.top_k=") == []
    assert {"sample.top_k=", "sample.top_p="} <= {*found.complete("sample.")}


def test_the_shell_completes_fields_of_recipes() -> None:
    def completed(incomplete: str, name: str = "train-draft", **params: str) -> list[str]:
        context = typer.Context(load_command(name))
        context.params = params
        return complete_field(context, incomplete)

    assert completed("train.st") == ["train.steps="]
    assert completed("train.lora.ra") == ["train.lora.rank="]
    assert completed("train.parallel=") == ["train.parallel=ddp", "train.parallel=fsdp"]
    assert completed("data.regen") == ["data.regenerate=true", "data.regenerate=false"]
    assert "serve.policy=dynamic-tree" in completed("serve.policy=dy")
    assert "drafter.family=eagle3" in completed("drafter.family=ea")
    assert completed("drafter.") == ["drafter.family=", "drafter.options.", "drafter.init="]
    assert completed("drafter.options.win", run_recipe="eagle3") == ["drafter.options.window="]
    assert completed("drafter.options.win", run_recipe="no/such.yaml") == []
    assert completed("train.steps=") == completed("nothing.") == []
    assert {"train.steps=", "vocab.size="} <= {*completed("")}
    for field in schema_fields():
        assert section_at(tuple(field.rstrip(".").split("."))) is not None, field
    for name in ("train-draft", "distill", "plan", "quickstart"):
        (option,) = (p for p in load_command(name).params if "--set" in p.opts)
        assert option._custom_shell_complete is not None


@pytest.mark.parametrize("name", ["serve", "bench"])
def test_what_a_command_cannot_do_is_not_listed_and_still_refused_by_reason(
    name: str, run: Any
) -> None:
    key = "target.tensor_parallel"
    found: Settings = load_command(name).callback.settings
    assert found.complete("target.te") == []
    assert key not in dict(found.shown)
    assert key in dict(load_command("generate").callback.settings.shown)
    ran = run(name, "--set", f"{key}=true")
    assert ran.code != 0
    assert "does not keep several processes in step" in ran.err


def test_a_recipe_and_a_target_are_set_by_one_flag() -> None:
    words = ["--set", "train.rows=4", "--set", "target.revision=abc"]
    found = _context("bench-families", *words)
    assert list(found.params["sets"]) == ["train.rows=4"]
    assert found.meta[SET] == {"target_revision": "abc"}


def _context(command: str, *words: str) -> Any:
    """What the program makes of a command line."""
    parent = typer.main.get_command(app).make_context("specctl", [command])
    return load_command(command).make_context(command, [*words], parent)
