"""Targets that cannot be run here: drafters are trained for them, packaged and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import specctl.recipes
from specctl_testing.cli.ran import Run
from specctl_testing.models import build_model

SETS = (
    "train.steps=2", "train.rows=2", "train.seq_len=32", "train.tau_prompts=2", "vocab.size=512",
    "data.regenerate=false", "data.format=text", "data.limit_tokens=900", "data.text_tokens=0",
)  # fmt: skip


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    """A random hybrid whose states are of no kind that is kept here, in several files."""
    folder = tmp_path / "hybrid"
    model = build_model("zaya", vocab=6144, num_experts_per_tok=1)
    model.save_pretrained(folder, max_shard_size="300KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2
    tiny = Path(specctl.recipes.__path__[0]) / "tiny"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def test_a_drafter_is_trained_packaged_and_exported_for_a_hybrid(
    run: Run, hybrid: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "run"
    text.write_text("\n".join(f"def name_{i}(value):\n    return value" for i in range(80)))
    words = ["train-draft", "--recipe", "eagle3", "--target", hybrid, "--data", text, "--out", out]
    answers = run(*words, "--set", "data.format=text", "--set", "train.seq_len=64")
    assert answers.code != 0
    assert "data.regenerate=false" in answers.err
    made = run(*words, *(word for each in SETS for word in ("--set", each)), "--json")
    assert made.code == 0, made.err
    assert "not measured by decoding" in made.err
    manifest = json.loads((out / "package" / "manifest.json").read_text())
    assert manifest["acceptance"]["data"].endswith("nothing was decoded")
    assert manifest["acceptance"]["temperature"] == 1.0
    assert 1.0 <= manifest["acceptance"]["tau"] == pytest.approx(made.json["result"]["tau"])
    exported = run("export", "--draft", out, "--to", "speculators", "--out", tmp_path / "engine")
    assert exported.code == 0, exported.err
    ran = run("generate", "--draft", out / "package", "def main(")
    assert ran.code == 5
    assert "recurrent state" in ran.err
