"""What a user can do wrong: every mistake is answered in four parts, with a step that works."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import Exit, FileError, SpecctlError
from specctl.recipes.targets import resolve
from specctl_testing.cli import commands
from specctl_testing.error_walk import places, provoked, record, remedies, wrong_words

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "tiny"


@dataclass(frozen=True, slots=True)
class Mistake:
    """Words of a command line, the exit code, and what the remedy must contain."""

    words: tuple[str, ...]
    code: int
    do: str
    stdin: str = ""


G = ("generate", "--max-new-tokens", "4")

MISTAKES = {
    # the command line
    "unknown command": Mistake(("genrate",), 2, "specctl generate --help"),
    "unknown flag": Mistake((*G, "--tempratur", "1", "x"), 2, "--temperature"),
    "word left out of a flag": Mistake((*G, "--max-tokens", "4", "x"), 2, "use --max-new-tokens "),
    "flag of llama.cpp": Mistake((*G, "--temp", "1", "x"), 2, "use --temperature "),
    "short flag of llama.cpp": Mistake((*G, "-md", "x.gguf", "x"), 2, "use --draft "),
    "flag of transformers": Mistake((*G, "--top_k", "4", "x"), 2, "--set sample.top_k=4"),
    "model of vLLM": Mistake(("serve", "--model", "tiny"), 2, "use --target "),
    "prompt as a flag": Mistake((*G, "-p", "x"), 2, "specctl generate"),
    "flag like no other": Mistake((*G, "--xyzzy", "x"), 2, "specctl generate --help"),
    "flag of another command": Mistake(("runs", "ls", "--in", "x"), 2, "specctl runs ls --help"),
    "a plan without the hub": Mistake(("plan", "-t", "some/model", "--offline"), 9, "specctl plan"),
    "not a number": Mistake(("generate", "--seed", "one", "x"), 2, "specctl generate --help"),
    "out of range": Mistake((*G, "--set", "sample.top_p=2", "x"), 3, "--help-all"),
    "missing argument": Mistake(("recipes", "show"), 2, "specctl recipes show --help"),
    "a run that is not there": Mistake(("bench", "runs/none"), 4, "check the path"),
    "a target that is not there": Mistake((*G, "-t", "runs/none", "x"), 4, "runs does not exist"),
    # prompts
    "no prompt": Mistake(G, 2, "specctl generate --max-new-tokens 4 "),
    "empty prompt": Mistake((*G, "  "), 2, "specctl generate --max-new-tokens 4 "),
    "empty standard input": Mistake((*G, "-"), 2, "| specctl generate --max-new-tokens 4 -"),
    "prompt and file": Mistake((*G, "-f", "x.txt", "text"), 2, "specctl generate -f prompts.txt"),
    "no such prompt file": Mistake((*G, "-f", "absent.txt"), 4, "existing file"),
    "empty prompt file": Mistake((*G, "-f", "EMPTY"), 2, "write at least one line"),
    "prompts that are not text": Mistake((*G, "-f", "BINARY"), 4, "iconv"),
    "prompts that are not JSON": Mistake((*G, "-f", "BROKEN"), 4, "correct that line"),
    "a prompt that is a number": Mistake((*G, "-f", "NUMBER"), 4, "correct that line"),
    "an infinite temperature": Mistake(
        (*G, "--temperature", "inf", "x"), 2, "specctl generate --help"
    ),
    "a top-k beyond all vocabularies": Mistake(
        (*G, "--set", "sample.top_k=" + "9" * 20, "x"), 3, "specctl generate --help-all"
    ),
    "a draft of absurdly many layers": Mistake(
        ("distill", "--dry-run", "--layers", "9" * 20), 2, "specctl distill --help"
    ),
    "a draft of absurd width": Mistake(
        ("distill", "--dry-run", "--width", "9" * 20), 2, "specctl distill --help"
    ),
    "no dtype's name": Mistake((*G, "--dtype", "", "x"), 2, "--dtype float32"),
    "no device's name": Mistake((*G, "--device", "", "x"), 2, "--device auto"),
    "more layers than the target has": Mistake(
        ("prune", "--layers", "99", "-o", "NEW"), 3, "drafter.options.layers"
    ),
    "a plan of more layers than the target has": Mistake(
        ("prune", "--layers", "99", "--dry-run"), 3, "drafter.options.layers"
    ),
    "more heads than the target has": Mistake(
        ("prune", "--heads", "3/2", "--dry-run"), 3, "drafter.options.heads"
    ),
    "no target's name": Mistake((*G, "-t", "", "x"), 2, "tiny"),
    "prompt lines without a prompt": Mistake((*G, "-f", "WRONG"), 4, "correct that line"),
    # targets
    "unknown target": Mistake((*G, "-t", "tinny", "x"), 2, "tiny"),
    "target folder that is not there": Mistake((*G, "-t", "./absent", "x"), 4, ""),
    "target folder without a model": Mistake((*G, "-t", "FOLDER", "x"), 4, ""),
    "unreachable target": Mistake((*G, "-t", "qwen3-8b", "--offline", "x"), 9, ""),
    "unknown dtype": Mistake((*G, "--dtype", "fp7", "x"), 2, ""),
    "unknown device": Mistake((*G, "--device", "tpu", "x"), 2, ""),
    "absent device": Mistake((*G, "--device", "cuda:7", "x"), 6, ""),
    "unknown inflation": Mistake((*G, "--inflate", "huge", "x"), 2, ""),
    "chat without a template": Mistake((*G, "-t", "PLAIN", "--chat", "x"), 5, ""),
    # drafters
    "unknown drafter": Mistake((*G, "-d", "prompt-lokup", "x"), 4, "prompt-lookup"),
    "drafter that is not there": Mistake((*G, "-d", "./absent", "x"), 4, ""),
    "drafter that must be trained": Mistake((*G, "-d", "eagle3", "x"), 4, "specctl train-draft"),
    "a recipe for its package": Mistake(
        ("export", "eagle3", "--to", "vllm", "-o", "NEW"), 4, "train-draft --recipe eagle3"
    ),
    "an unknown format, without a package": Mistake(
        ("export", "--target", "tiny", "--to", "sglan", "-o", "NEW"), 3, "--to sglang"
    ),
    "a drafter that has no package": Mistake(
        ("export", "prompt-lookup", "-o", "NEW"), 4, "specctl recipes show prompt-lookup"
    ),
    "a recipe for a folder": Mistake(("show", "eagle3"), 4, "specctl recipes show eagle3"),
    "policy the drafter cannot": Mistake(
        (*G, "-d", "prompt-lookup", "--set", "serve.policy=chain", "x"), 3, "serve.policy=direct"
    ),
    "unknown policy": Mistake(
        (*G, "-d", "prompt-lookup", "--set", "serve.policy=tree", "x"), 3, "serve.policy=opt-tree"
    ),
    "unknown rule": Mistake((*G, "-d", "prompt-lookup", "--rule", "best", "x"), 3, ""),
    "illegal rule": Mistake(
        (*G, "-d", "prompt-lookup", "--rule", "block", "--temperature", "1", "x"), 3, ""
    ),
    "drafting flags without a drafter": Mistake((*G, "--length", "3", "x"), 2, "--draft"),
    # recipes
    "cutting another family from the target": Mistake(
        ("plan", "-r", "eagle3", "--init", "target"), 3, "drafter.family=small-lm"
    ),
    "additions to weights that are spread": Mistake(
        ("plan", "-r", "adapt", "--set", "train.parallel=fsdp"), 3, "set parallel: ddp"
    ),
    "shares that are too large": Mistake(
        ("plan", "--set", "train.warmup=0.9"), 3, "specctl recipes show eagle3"
    ),
    "unknown recipe": Mistake(("train-draft", "-r", "eagel3"), 3, "did you mean eagle3"),
    "no such recipe file": Mistake(("train-draft", "-r", "my-own.yaml"), 4, "specctl recipes cp"),
    "unknown recipe key": Mistake(("recipes", "validate", "TYPO"), 3, "learning_rate"),
    "unknown option of a family": Mistake(("recipes", "validate", "OPTION"), 3, "ttt_steps"),
    "unknown family": Mistake(("recipes", "validate", "FAMILY"), 3, "eagle3"),
    "broken recipe": Mistake(("recipes", "validate", "YAML"), 3, "specctl recipes show"),
    "set without a value": Mistake(("plan", "--set", "train.steps"), 3, "--set train.steps=400"),
    "set out of range": Mistake(("plan", "--set", "train.steps=0"), 3, "--set train.steps=600"),
    "set of an unknown key": Mistake(("plan", "--set", "train.stps=3"), 3, "steps"),
    "copy over a file": Mistake(("recipes", "cp", "eagle3", "TYPO"), 4, "--force"),
    "copy to nowhere": Mistake(
        ("recipes", "cp", "eagle3", "EMPTY/x/y.yaml"), 4, "choose another path"
    ),
    # training, trimming, packages
    "training what has no weights": Mistake(
        ("train-draft", "-r", "prompt-lookup"), 3, "specctl generate --draft prompt-lookup"
    ),
    "distilling another family": Mistake(("distill", "-r", "eagle3"), 3, "specctl train-draft"),
    "output that is a file": Mistake(
        ("train-draft", "-r", "distill", "-o", "EMPTY/x"), 4, "choose another path"
    ),
    "no such data": Mistake(
        ("train-draft", "-r", "distill", "--data", "absent.jsonl", "-o", "NEW"), 4, "--data self"
    ),
    "more GPUs than there are": Mistake(("train-draft", "--gpus", "64"), 6, "--gpus"),
    "unknown size": Mistake(("vocab-trim", "-d", "x", "-o", "NEW", "--size", "big"), 3, "--size"),
    "unknown selector": Mistake(
        ("vocab-trim", "-d", "x", "-o", "NEW", "--selector", "vocabtrim"), 3, "vocab-trim"
    ),
    "a size beside a search": Mistake(
        ("vocab-trim", "-d", "x", "-o", "NEW", "--search", "tpe", "--size", "2k"), 3, "--size"
    ),
    "trimming what has no head": Mistake(
        ("vocab-trim", "-d", "prompt-lookup", "-o", "NEW"), 2, "specctl train-draft"
    ),
    "unknown export format": Mistake(("export", "-d", "x", "-o", "NEW", "--to", "h"), 3, "--to hf"),
    "export of no package": Mistake(("export", "-d", "FOLDER", "-o", "NEW"), 4, ""),
    "unknown level": Mistake(("verify", "x", "--level", "all"), 3, "--level"),
    "verify what is nowhere": Mistake(("verify", "./absent"), 4, "specctl train-draft"),
    "verify no package": Mistake(("verify", "FOLDER"), 4, ""),
    "unknown suite": Mistake(("bench", "-t", "no/such", "--suite", "eviryday"), 3, "everyday"),
    "suite that is nowhere": Mistake(
        ("bench", "-t", "no/such", "--suite", "gsm8k=absent"), 4, "path"
    ),
    "no file to measure on": Mistake(("bench", "-t", "no/such", "-f", "absent"), 4, "correct the"),
    "unknown baseline": Mistake(("bench", "--against", "hg"), 3, "--against hf"),
    "format that cannot hold the family": Mistake(
        ("train-draft", "-r", "medusa", "-o", "NEW", "--set", "export.formats=[specctl,hf]"),
        3,
        "--set export.formats=[specctl]",
    ),
    "gate with a version": Mistake(("bench", "--gate", "tau>=1.2.3"), 3, "--gate"),
    "run that holds no recipe": Mistake(("show", "NORUN"), 4, "specctl recipes ls"),
    "model that is a list": Mistake(("show", "NOMODEL"), 4, "download the folder again"),
    "half a character": Mistake((*G, "a\ud800"), 2, "iconv"),
    "pretraining recipe that is no text": Mistake(
        ("pretrain", "-r", "BINARY", "-o", "NEW"), 4, "tiny-target"
    ),
    "unreadable gate": Mistake(("bench", "--gate", "fast"), 3, "--gate"),
    "show nothing": Mistake(("show", "FOLDER"), 4, "folder"),
    "show a file": Mistake(("show", "EMPTY"), 4, "specctl show"),
    "no such pretraining recipe": Mistake(("pretrain", "-r", "x", "-o", "NEW"), 4, "tiny-target"),
}


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], str]:
    """Words in capitals stand for files of these kinds."""
    texts = {
        "EMPTY": ("empty.txt", b"\n \n"),
        "BINARY": ("binary.txt", b"\xff\xfe\x00"),
        "BROKEN": ("broken.jsonl", b'{"prompt": "x"}\n{"prompt": \n'),
        "WRONG": ("wrong.jsonl", b'{"wording": "x"}\n'),
        "NUMBER": ("number.jsonl", b'{"prompt": 3}\n'),
        "TYPO": ("typo.yaml", b"train: {lerning_rate: 0.1}\n"),
        "OPTION": ("option.yaml", b"drafter: {family: eagle3, options: {ttt_step: 3}}\n"),
        "FAMILY": ("family.yaml", b"drafter: {family: eagl3}\n"),
        "YAML": ("yaml.yaml", b"train: [\n"),
    }
    paths = {"NEW": tmp_path / "new", "FOLDER": tmp_path / "folder", "PLAIN": tmp_path / "plain"}
    for word, (name, body) in texts.items():
        paths[word] = tmp_path / name
        paths[word].write_bytes(body)
    paths["FOLDER"].mkdir()
    (paths["FOLDER"] / "notes.txt").write_text("nothing here")
    folders = {"NORUN": ("run.yaml", "recipe: 5\n"), "NOMODEL": ("config.json", "[]")}
    for word, (file, text) in folders.items():
        paths[word] = tmp_path / word.lower()
        paths[word].mkdir()
        (paths[word] / file).write_text(text)

    def replace(word: str) -> str:
        head, slash, tail = word.partition("/")
        if head == "PLAIN" and not paths["PLAIN"].exists():
            _without_template(paths["PLAIN"])
        return f"{paths[head]}{slash}{tail}" if head in paths else word

    return replace


def _without_template(folder: Path) -> None:
    """The embedded target with its chat template taken away."""
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_answered_with_a_working_step(
    name: str,
    run: Any,
    place: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    mistake = MISTAKES[name]
    words = [place(word) for word in mistake.words]
    ran = run(*words, "--json", stdin=mistake.stdin)
    error = ran.json["error"]
    assert ran.code == error["code"] == mistake.code, error
    assert ran.code != Exit.BUG
    assert error["what"]
    assert error["found"], error
    assert error["expected"], error
    assert mistake.do in error["do"], error
    check_step(words[0], error["do"])
    for part in error.values():
        assert "\n" not in str(part), error


def check_step(command: str, do: str) -> None:
    """A remedy that names a command or a flag of ours must name one that exists."""
    assert do, "an error without a remedy"
    if "specctl " in do:
        words = commands.program_words(do)
        assert commands.why_not(words) is None, (do, commands.why_not(words))
    elif flag := re.match(r"(?:use )?(--[a-z][a-z-]*)", do):
        assert commands.has_flag(command, flag[1]) or flag[1] == "--set", do


def test_every_remedy_in_the_product_names_commands_and_flags_that_there_are() -> None:
    """Also those that no test provokes; `make errors` says which these are."""
    written = list(remedies())
    assert len(written) > 800
    assert [(path, line, wrong) for path, line, do in written if (wrong := wrong_words(do))] == []


def test_a_remedy_that_leads_nowhere_would_be_seen() -> None:
    assert wrong_words("specctl distil --target X, or --no-such-flag") == [
        "specctl distil",
        "--no-such-flag",
    ]
    assert wrong_words("specctl runs lst") == ["specctl runs lst"]
    assert wrong_words("hf download X --local-dir FOLDER; then --target FOLDER") == []


def test_errors_are_recorded_by_the_place_that_made_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(SpecctlError, "__init__", SpecctlError.__init__)  # and back afterwards
    record(tmp_path)
    with pytest.raises(FileError) as raised:
        resolve(str(tmp_path / "none"))
    (error,) = provoked(tmp_path)
    (place,) = [p for p in places() if p.path == error.path and p.line <= error.line <= p.end]
    assert (error.kind, error.do) == (place.kind, raised.value.do)
    assert error.do


def test_there_are_enough_mistakes() -> None:
    assert len(MISTAKES) >= 50


def test_a_remedy_that_does_not_work_would_be_seen() -> None:
    with pytest.raises(AssertionError):
        check_step("generate", "specctl generate --drafter x")
    with pytest.raises(AssertionError):
        check_step("generate", "--drafter x")
