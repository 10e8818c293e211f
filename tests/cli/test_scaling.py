"""plan --scaling from flags to files, on a random target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specctl.train.pretrain.data import train_tokenizer


def test_a_grid_ends_in_a_table_a_picture_and_a_price(
    run: Any, tmp_path: Path, make_model: Any
) -> None:
    texts = [f"def f{i}(x):\n    return x + {i}" for i in range(200)]
    tokenizer, data = train_tokenizer(texts, 300, 256), tmp_path / "words.txt"
    data.write_text("\n\n".join(texts))
    make_model(num_layers=2, hidden=16, vocab=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    sets = [
        "data.regenerate=false", "data.text_tokens=0", "train.rows=4", "train.seq_len=32",
        "train.tau_prompts=2", "train.tau_tokens=4", "scaling.sizes=[[1, 8], [2, 16]]",
        "scaling.steps=[1, 2]", "drafter.options={head_dim: 8}",
    ]  # fmt: skip
    words = ["plan", "--scaling", "--recipe", "scaling", "--target", tmp_path / "target"]
    words += ["--data", data, "--out", tmp_path / "grid"]
    words += [word for field in sets for word in ("--set", field)]
    ran = run(*words)
    assert ran.code == 0, ran.err
    assert "2 x 16" in ran.out
    assert ran.out.count("the next 0.1 of tau by") == 2
    assert (tmp_path / "grid" / "scaling.png").exists()
    written = json.loads((tmp_path / "grid" / "scaling.json").read_text())
    answer = run(*words, "--json").json["result"]
    assert {key: answer[key] for key in written} == written
    assert len(written["points"]) == 4
    assert written["law"]["r2"] <= 1.0
