"""Drafters of targets with recurrent layers, from answers to text, as the commands make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import specctl.recipes
from specctl.runtime.target.target import load_target
from specctl_testing.cli.ran import Run
from specctl_testing.export.mtp_cases import checkpoint

PROMPT = "def main(argv):\n"
SETS = (
    "train.steps=3", "train.rows=2", "train.seq_len=32", "train.tau_prompts=2",
    "train.tau_tokens=8", "vocab.size=null", "data.text_tokens=0", "data.regenerate=false",
)  # fmt: skip
RECIPES = {
    "eagle3": ("data.features=offline", "drafter.options.ttt_steps=2"),
    "medusa": (),
    "dflash": ("drafter.options.layers=1", "drafter.options.anchors=4"),
    "qwen3-next-mtp": ("target.dtype=auto",),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of random hybrids that carry a module for multi-token prediction."""
    tokenizer = AutoTokenizer.from_pretrained(Path(specctl.recipes.__path__[0]) / "tiny")

    @cache
    def made(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "target"
        checkpoint(kind, folder, tokenizer=tokenizer)
        tokenizer.save_pretrained(folder)
        return folder

    return made


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture
def answers(hybrid: Callable[[str], Path], run: Run, kept: Path) -> Callable[[str], Path]:
    """Texts that a hybrid wrote, once."""

    def written(kind: str) -> Path:
        text, out = kept / "words.jsonl", kept / kind
        if out.exists():
            return out / "answers.jsonl"
        lines = [{"text": f"def name_{i}(value):\n    return {i}"} for i in range(24)]
        text.write_text("\n".join(map(json.dumps, lines)))
        words = ("--target", hybrid(kind), "--data", text, "--prompts", 24, "--out", out)
        made = run("regenerate", *words, "--max-new-tokens", 16)
        assert made.code == 0, made.err
        return out / "answers.jsonl"

    return written


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("qwen3_next", name) for name in RECIPES),
        pytest.param("qwen3_5_text", "qwen3-next-mtp", marks=pytest.mark.proof),
    ],
)
def test_a_drafter_of_a_hybrid_is_trained_packaged_and_drafts(
    kind: str,
    name: str,
    hybrid: Callable[[str], Path],
    answers: Callable[[str], Path],
    run: Run,
    tmp_path: Path,
) -> None:
    target, out = hybrid(kind), tmp_path / "run"
    words = ["train-draft", "--target", target, "--recipe", name, "--data", answers(kind)]
    sets = [word for each in (*SETS, *RECIPES[name]) for word in ("--set", each)]
    made = run(*words, "--out", out, *sets, "--allow", "recipe", "--json")
    assert made.code == 0, made.err
    assert "not measured by decoding" not in made.err
    measured = json.loads((out / "package" / "manifest.json").read_text())["acceptance"]
    assert not measured["data"].endswith("nothing was decoded")
    assert 1.0 <= measured["tau"] == pytest.approx(made.json["result"]["tau"])
    texts = list[str]()
    for draft in ([], ["--draft", out / "package"]):
        greedy = ("--max-new-tokens", 12, "--temperature", 0, "--set", "sample.ignore_eos=true")
        ran = run("generate", "--target", target, *draft, *greedy, "--json", PROMPT)
        assert ran.code == 0, ran.err
        texts.append(ran.json["result"]["outputs"][0]["text"])
    assert texts[0] == texts[1] != ""


def test_rows_beyond_a_short_context_offer_to_derive_them(
    hybrid: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    assert load_target(str(hybrid("qwen3_next"))).spec.max_positions == 256
    words = ("train-draft", "--target", hybrid("qwen3_next"), "--out", tmp_path / "run")
    ran = run(*words, "--recipe", "eagle3", "--allow", "recipe", "--set", "train.seq_len=512")
    assert ran.code != 0
    assert "its context is 256 tokens" in ran.err
    assert "--time 40m" in ran.err
