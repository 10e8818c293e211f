"""train.joint from the command line: a changed target and the drafter for it, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.train.pretrain.data import train_tokenizer

TEXTS = [f"def f{i}(x):\n    return x + {i}\n\nhello world, how are you {i}?\n" for i in range(60)]
SMALL = (
    "data.prompts=8", "data.new_tokens=8", "data.prompt_tokens=6", "data.text_tokens=0",
    "train.steps=4", "train.rows=4", "train.seq_len=48", "train.tau_prompts=2",
    "train.tau_tokens=6", "train.joint.rank=2", "vocab.size=200", "drafter.options={num_heads: 2}",
    "target.dtype=float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, make_model: Any) -> Path:
    """A folder with a random target, and data.jsonl beside it."""
    root = tmp_path_factory.mktemp("joint")
    tokenizer = train_tokenizer(TEXTS, 300, 256)
    model = make_model(
        num_layers=2, hidden=16, vocab=len(tokenizer), eos_token_id=0, max_position_embeddings=1024
    )
    model.save_pretrained(root / "original")
    tokenizer.save_pretrained(root / "original")
    rows = [{"prompt": text[:6], "response": text[6:]} for text in TEXTS]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "original"


def test_the_changed_target_and_its_drafter_generate_together_and_the_original_is_refused(
    run: Any, original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["--recipe", "medusa-2", "--target", original, "--out", out]
    words += ["--data", original.parent / "data.jsonl"]
    words += [word for text in SMALL for word in ("--set", text)]
    planned = run("train-draft", *words, "--dry-run")
    assert "THE TARGET CHANGES" in planned.out
    trained = run("train-draft", *words, "--json")
    assert trained.code == 0, trained.err
    assert trained.json["result"]["target"] == str(out / "target")
    assert "CHANGES THE TARGET" in trained.err
    assert "THE TARGET WAS CHANGED" in trained.err
    generate = ("generate", "def f1(x):", "--max-new-tokens", 6, "--draft", out / "package")
    together = run(*generate, "--target", out / "target", "--json")
    assert together.code == 0, together.err
    plain = run(*generate[:4], "--target", out / "target", "--json")
    made = (ran.json["result"]["outputs"][0]["token_ids"] for ran in (together, plain))
    assert next(made) == next(made), "lossless with respect to the changed target"
    assert run(*generate, "--target", original).code == 5
    assert "CHANGED from" in run("show", out / "package").out


def test_a_target_that_learned_alone_drafts_for_itself_and_not_for_the_original(
    run: Any, original: Path, tmp_path: Path
) -> None:
    out, own = tmp_path / "out", ("vocab.size", "drafter.options")
    words = ["--recipe", "make-some-noise", "--target", original, "--out", out]
    words += ["--data", original.parent / "data.jsonl"]
    words += [w for text in SMALL if not text.startswith(own) for w in ("--set", text)]
    assert "THE TARGET CHANGES" in run("train-draft", *words, "--dry-run").out
    trained = run("train-draft", *words, "--json")
    assert trained.code == 0, trained.err
    assert "THE TARGET WAS CHANGED" in trained.err
    generate = ("generate", "def f1(x):", "--max-new-tokens", 6, "--draft", out / "package")
    together = run(*generate, "--target", out / "target", "--json")
    assert together.code == 0, together.err
    plain = run(*generate[:4], "--target", out / "target", "--json")
    made = (ran.json["result"]["outputs"][0]["token_ids"] for ran in (together, plain))
    assert next(made) == next(made), "lossless with respect to the changed target"
    assert run(*generate, "--target", original).code == 5
    again = run("train-draft", *words, "--json")
    assert again.code == 0, again.err
    assert "finished before" in again.err
