"""The journey with a target of one's own: a short context, no alias, a package that knows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import specctl.recipes
from specctl_testing.cli.ran import Run

SETS = (
    "train.steps=1", "train.rows=2", "train.seq_len=32", "train.tau_prompts=1",
    "train.tau_tokens=4", "data.prompts=4", "data.prompt_tokens=8", "data.new_tokens=8",
    "data.text_tokens=0", "vocab.size=512",
)  # fmt: skip


@pytest.fixture
def own(make_model: Callable[..., Any], tmp_path: Path) -> Path:
    """A random Llama that reads 64 tokens at most, under the embedded tokenizer."""
    folder = tmp_path / "own"
    model = make_model(num_layers=2, vocab=6144, max_position_embeddings=64, eos_token_id=1)
    model.save_pretrained(folder)
    tiny = Path(specctl.recipes.__path__[0]) / "tiny"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def test_a_package_is_made_for_a_short_context_and_used_without_naming_its_target(
    run: Run, own: Path, tmp_path: Path
) -> None:
    """Packaging decodes held-out prompts, which must not be longer than the target can read."""
    text, out = tmp_path / "words.txt", tmp_path / "run"
    text.write_text("\n".join(f"def name_{i}(value):\n    return value" for i in range(80)))
    sets = [word for each in SETS for word in ("--set", each)]
    made = run("train-draft", "--recipe", "medusa", "--target", own, "--data", text, "--out", out,
               *sets)  # fmt: skip
    assert made.code == 0, made.err
    package = out / "package"
    short = ("--max-new-tokens", 4)
    said = run("generate", "--draft", package, "--json", *short, "def main(")
    assert said.code == 0, said.err
    assert said.json["result"]["target"]["name"] == str(own)
    of_run = run("generate", "--draft", out, "--json", *short, "def main(")
    assert of_run.code == 0, of_run.err
    talked = run("chat", "--draft", package, "--json", *short, stdin="hello\n")
    assert talked.code == 0, talked.err
    trimmed = run("vocab-trim", "--draft", package, "--size", "128", "--num-prompts", 1,
                  *short, "--out", tmp_path / "trimmed")  # fmt: skip
    assert trimmed.code == 0, trimmed.err
    table = run("bench", "--draft", package, "--num-prompts", 1, "--repeats", 1, *short, "--json")
    assert table.code == 0, table.err
    assert table.json["result"]["target"]["name"] == str(own)
    tiny = run("generate", "--draft", package, "--target", "tiny", *short, "def main(")
    assert tiny.code == 5
