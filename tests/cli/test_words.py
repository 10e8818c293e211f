"""What may be typed: drafters as words, short training flags, engines, names, help, completion."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specctl.cli.app.bash_words import words_of_bash
from specctl.cli.app.console import Console
from specctl.cli.commands.generate import told_apart
from specctl.cli.main import load_command, main
from specctl.cli.options.positional import one_drafter
from specctl.cli.options.recipe_flags import TrainingFlags
from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.core.messages.printable import counted
from specctl.export.formats import find_format, format_for


def test_two_words_are_drafter_and_prompt_and_one_is_the_prompt(tmp_path: Path) -> None:
    assert told_apart(["prompt-lookup", "def f"], None) == ("prompt-lookup", "def f")
    assert told_apart(["prompt-lookup"], None) == (None, "prompt-lookup")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "manifest.json").write_text("{}")
    assert told_apart([str(tmp_path)], None) == (str(tmp_path), None)
    for text in ("~3 apples", "~you+me"):  # no user of that name has a home
        assert told_apart([text], None) == (None, text)
    with pytest.raises(SpecctlError, match="too many words"):
        told_apart(["a", "b", "c"], None)


@pytest.mark.parametrize(
    ("words", "do"),
    [
        (("verify", "--levle", "files"), "use --level  (specctl verify --help)"),
        (("generate", "--max-tokens", "4"), "use --max-new-tokens  (specctl generate --help)"),
        (("generate", "--lora-rank", "3", "x"), "specctl generate --help"),
        (("runs", "tail", "--lines"), "specctl runs tail --help"),
        # what is a setting now
        (("generate", "--nodes", "9"), "use --set serve.nodes=9  (specctl generate --help-all)"),
        (("chat", "--stop", "a b"), "use --set 'sample.stop=a b'  (specctl chat --help-all)"),
        (("generate", "--word", "9"), "specctl generate --help"),  # an argument is no flag
        (("serve", "--drain=5"), "use --set limits.drain=5  (specctl serve --help-all)"),
        (("bench", "--no-parallel"), "use --set serve.parallel=false  (specctl bench --help-all)"),
        (
            ("chat", "--draft-option", "window=4"),
            "use --set drafter.options.window=4  (specctl chat --help-all)",
        ),
        (("serve", "--policy"), "use --set serve.policy=VALUE  (specctl serve --help-all)"),
        (("generate", "--json-schema", "a.json"), "use --grammar FILE.json"),
    ],
)
def test_an_unknown_flag_gets_one_hint(
    words: tuple[str, ...], do: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specctl", *words])
    found = run(*words, "--json").json["error"]
    assert found["code"] == 2
    assert found["do"] == do
    assert ("setting now" in found["what"]) == ("--set" in do)


def test_help_names_numbers_and_pairs_in_few_columns(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--help-all").code == 0
    text = capsys.readouterr().out
    assert "--[no-]adaptive" in text
    assert "1..64" in text
    assert "range" not in text


def test_a_drafter_is_given_once() -> None:
    assert one_drafter("runs/a", None, "") == one_drafter(None, "runs/a", "") == "runs/a"
    with pytest.raises(SpecctlError, match="given twice"):
        one_drafter("runs/a", "runs/b", "")
    with pytest.raises(SpecctlError, match="no drafter was given"):
        one_drafter(None, None, "specctl export runs/a")


def test_a_word_drafts_as_the_flag_does(run: Any) -> None:
    words = ("--max-new-tokens", "12", "--json")
    by_word = run("generate", "prompt-lookup", "import os\nimport ", *words).json["result"]
    by_flag = run("generate", "-d", "prompt-lookup", "import os\nimport ", *words).json["result"]
    assert by_word["outputs"] == by_flag["outputs"]
    assert by_word["stats"]["drafted"] == by_flag["stats"]["drafted"] > 0


def test_short_flags_are_fields_of_the_recipe() -> None:
    flags = TrainingFlags(recipe="eagle3", steps=7, lr=0.5, batch_size=3)
    recipe = flags.load()
    assert (recipe.train.steps, recipe.train.learning_rate, recipe.train.rows) == (7, 0.5, 3)
    assert recipe.origin["train.rows"] == "--batch-size"


@pytest.mark.parametrize(
    ("engine", "family", "form"),
    [
        ("vllm", "eagle3", "speculators"),
        ("vllm", "small-lm", "hf"),
        ("vllm", "medusa", "vllm-medusa"),
        ("sglang", "eagle3", "sglang"),
        ("sglang", "small-lm", "hf"),
        ("llama.cpp", "small-lm", "gguf"),
        ("trtllm", "eagle3", "sglang"),
        ("openvino", "eagle3", "openvino"),
        ("openvino", "dflash", "openvino"),
        ("mlx", "small-lm", "hf"),
        ("hf", "eagle3", "hf"),
    ],
)
def test_an_engine_chooses_the_format_by_the_family(engine: str, family: str, form: str) -> None:
    assert format_for(engine, family) == form


def test_a_format_that_does_not_fit_names_the_one_that_does() -> None:
    with pytest.raises(IncompatibleError) as refused:
        find_format("vllm-medusa", "eagle3")
    assert refused.value.do.startswith("--to speculators")
    with pytest.raises(IncompatibleError) as refused:
        format_for("trtllm", "eagle")
    assert refused.value.do == "--to sglang"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--set", "serve.policy=dynamic-tre"), "serve.policy=dynamic-tree"),
        (("--rule", "blok"), "--rule block"),
        (("--set", "serve.controller=cascad"), "serve.controller=cascade"),
        (("--set", "serve.stop=svipp"), "serve.stop=svip"),
        (("-d", "prompt-lokup"), "did you mean prompt-lookup"),
    ],
)
def test_wrong_names_are_refused_before_torch(words: tuple[str, ...], flag: str) -> None:
    script = (
        "import sys\nfrom specctl.cli.main import main\n"
        f"code = main(['generate', 'x', '--json', *{list(words)!r}])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\nsys.exit(code)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode in (3, 4), ran.stderr
    assert flag in json.loads(ran.stdout)["error"]["do"]


def test_another_tools_word_leads_to_our_command(run: Any) -> None:
    meant = {
        "train": "specctl train-draft --help",
        "benchmark": "specctl bench --help",
        "distil": "specctl distill --help",
        "resume": "specctl runs resume --help",
        "upload": "specctl export --help",
        "version": "use --version  (specctl --help)",
        "help": "specctl --help",
        "quantize": "specctl --help",  # like no command of ours
    }
    for word, do in meant.items():
        assert run(word, "--json").json["error"]["do"] == do, word


def test_help_is_short_and_help_all_is_whole(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    shown = []
    for flag in ("--help", "--help-all"):
        assert main(["generate", flag]) == 0
        shown.append(capfd.readouterr().out)
    short, whole = shown
    assert "--help-all" in short
    assert "sample.presence_penalty" not in short
    assert "sample.presence_penalty" in whole
    assert len(short.splitlines()) < 0.75 * len(whole.splitlines())
    assert main(["serve", "--help"]) == 0
    served = capfd.readouterr().out
    assert "--api-key-file" in served
    assert "/v1/messages" in served
    assert "limits.queue_timeout" not in served


@pytest.mark.parametrize(("name", "most"), [("serve", 30), ("generate", 31)])
def test_help_shows_at_most_20_flags_of_about_30(
    name: str, most: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    counts = {}
    for flag in ("--help", "--help-all"):
        assert main([name, flag]) == 0
        counts[flag] = len(re.findall(r"^\S --", capfd.readouterr().out, re.MULTILINE))
    assert 15 <= counts["--help"] <= 20
    assert counts["--help"] < counts["--help-all"] <= most
    command = load_command(name)
    assert counts["--help-all"] == 1 + sum(p.param_type_name == "option" for p in command.params)


def test_help_writes_arguments_plainly_and_keeps_the_examples_indented(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    usages = {
        ("generate",): "generate [OPTIONS] [DRAFTER] [PROMPT]",
        ("bench",): "bench [OPTIONS] [DRAFTER]...",
        ("runs", "compare"): "runs compare [OPTIONS] RUN...",
        ("runs", "ls"): "runs ls [OPTIONS] [FOLDER]",
    }
    for words, usage in usages.items():
        assert main([*words, "--help"]) == 0
        shown = capfd.readouterr().out
        assert f"Usage: specctl {usage}" in [line.strip() for line in shown.splitlines()]
        assert "list[" not in shown
        assert f"   specctl {' '.join(words)}" in shown  # an example, indented


def test_the_version_in_json_names_the_libraries(run: Any) -> None:
    found = run("--version", "--json").json["result"]
    assert {"version", "python", "torch", "transformers"} <= set(found)


def test_an_interruption_is_told_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    told = SpecctlError("interrupted", found="nothing was saved", do="specctl bench")
    Console(io.StringIO(), err).fail(told, 130)
    assert err.getvalue().startswith("interrupted\n")
    assert "error" not in err.getvalue()


def test_recipes_are_listed_in_groups_and_found_by_a_word(run: Any) -> None:
    rows = run("recipes", "ls", "--json").json["result"]["recipes"]
    group = {row["name"]: row["group"] for row in rows}
    assert group["eagle3"] == "recommended"
    assert group["medusa"] == "trained"
    assert group["prompt-lookup"] == "no training"
    assert group["qwen3-8b-eagle3"] == "for real targets"
    rows = run("recipes", "ls", "--family", "eagle3", "--json").json["result"]["recipes"]
    assert {row["family"] for row in rows} == {"eagle3"}
    rows = run("recipes", "ls", "--search", "TREE", "--json").json["result"]["recipes"]
    assert 0 < len(rows) < len(group)
    assert "..." not in run("recipes", "ls").out
    assert run("recipes", "ls", "--family", "eagel3").code == 3


def test_a_recipe_shows_what_differs_and_with_all_the_rest(run: Any) -> None:
    short, whole = (run("recipes", "show", "eagle3", *more).out for more in ((), ("--all",)))
    assert "train.rows" in short
    assert "train.weight_decay" not in short
    assert "train.weight_decay" in whole


def test_a_targets_name_can_be_shown(run: Any) -> None:
    tiny = run("show", "tiny", "--json").json["result"]
    assert (tiny["kind"], tiny["repo"]) == ("target", None)
    big = run("show", "qwen3-8b", "--json").json["result"]
    assert big["repo"] == "Qwen/Qwen3-8B"
    assert big["shape"]["layers"] == 36
    assert "qwen3-8b" in run("show", "qwen3-8", "--json").json["error"]["do"]


def test_the_shell_completes_names(tmp_path: Path) -> None:
    for words, wanted in (
        ("specctl train-draft --recipe eag", "eagle3"),
        ("specctl generate --target qwen3-8", "qwen3-8b"),
        ("specctl export x --to llama", "llama.cpp"),
        ("specctl bench prompt-l", "prompt-lookup"),
        ("specctl serve --set no.such=1 --set limits.dr", "limits.drain="),
        ("specctl chat --set serve.policy = dyn", "dynamic-tree"),  # as bash splits it
        ("specctl serve --name a : b --set serve.parallel =", "true"),
        ("specctl bench --set drafter.tr", "drafter.translate=slem"),
    ):
        asked = {"_SPECCTL_COMPLETE": "complete_bash", "COMP_WORDS": words}
        asked["COMP_CWORD"] = str(len(words.split()) - 1)
        script = "import sys; sys.argv = ['specctl']; from specctl.cli.main import run; run()"
        ran = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | asked, capture_output=True, text=True
        )
        assert wanted in ran.stdout.split(), (words, ran.stdout, ran.stderr)


@pytest.mark.parametrize(
    ("words", "joined", "answers"),
    [
        ("generate\n--set\na.b\n=\nx", "generate\n--set\na.b=x", "a.b=xy -> xy"),
        ("generate\n--set\na.b\n=", "generate\n--set\na.b=", "a.b=x -> x"),
        ("generate\n--set\na.b\n=\nx\n=\ny", "generate\n--set\na.b=x=y", "a.b=x=yz -> yz"),
        ("bench\nh\n:\n1\nx", "bench\nh:1\nx", "h:1 -> h:1"),
        ("generate\n", "generate\n", "generate -> generate"),
        ("bench\n--set\na.", "bench\n--set\na.", "a.b= -> a.b=\na.b=..."),
        ("bench\n--set\na.b\n=", "bench\n--set\na.b=", "a.b=c= -> c=\nc=..."),
    ],
)
def test_words_that_bash_splits_are_joined(
    words: str, joined: str, answers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"specctl\n{words}"
    environ = {"_SPECCTL_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environ["COMP_CWORD"] = str(words.count("\n"))
    inside, outside = answers.split(" -> ")
    with words_of_bash(environ):
        print(inside)
    assert capsys.readouterr().out == f"{outside}\n"
    assert environ["COMP_WORDS"] == f"specctl\n{joined}"
    assert environ["COMP_CWORD"] == str(environ["COMP_WORDS"].count("\n"))


def test_counts_agree_with_their_words() -> None:
    assert counted(1, "row") == "1 row"
    assert counted(1200, "row") == "1,200 rows"
    assert counted(2, "family", "families") == "2 families"
