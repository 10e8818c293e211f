"""`specctl regenerate`: answers alone, by us or a server; training takes them as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import Exit
from specctl.recipes.load import load_recipe
from specctl.runtime.target import served
from specctl.runtime.target.target import Target
from specctl.train.data.prepare import prepare
from specctl.train.pretrain.data import EOS, train_tokenizer
from specctl_testing.models import build_model
from specctl_testing.runtime.chat_targets import TEMPLATE
from specctl_testing.train.fake_endpoint import FakeEndpoint

CHAT = [
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "And a tuple?"},
    {"role": "assistant", "content": "b"},
]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_answers_are_written_once_and_trained_on_as_they_are(
    run: Any, tmp_path: Path, tiny_target: Target
) -> None:
    out, text = tmp_path / "answers", tmp_path / "texts.jsonl"
    texts = ("import os\nimport sys\n", "def main(argv):\n    return 0\n", "class A:\n    pass\n")
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    words = ("--data", text, "--prompts", "3", "--max-new-tokens", "5", "--out", out)
    ran = run("--json", "regenerate", *words)
    assert ran.code == 0, ran.err
    lines = lines_of(out)
    assert ran.json["result"]["documents"] == len(lines) == 3
    assert ran.json["result"]["tokens"] == sum(sum(line["loss_mask"]) for line in lines)
    assert all(line["text"] == tiny_target.decode(line["input_ids"]) for line in lines)
    assert "3 of 3 prompts are answered, 0 are left to write" in run("regenerate", *words).err
    (following,) = ran.json["next"]
    assert f"--data {out / 'answers.jsonl'}" in following
    assert "regenerate" not in following
    sets = [f"data.source={out / 'answers.jsonl'}", "data.text_tokens=0"]
    sets += ["data.train_on_prompt=false"]
    data = prepare(load_recipe("distill", sets=sets), tiny_target, tmp_path / "run")
    learned = sorted(ids.tolist() for ids, _ in data.answers())
    drawn = [
        [i for i, mark in zip(line["input_ids"], line["loss_mask"], strict=True) if mark]
        for line in lines
    ]
    assert learned == sorted(drawn)


def test_a_server_writes_them_and_no_layer_is_loaded(
    run: Any, tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": CHAT}) + "\n")
    monkeypatch.setattr("specctl.runtime.target.target.load_checkpoint", None)
    monkeypatch.setattr(served.StoredWeights, "whole", None)
    word = tiny_target.tokenizer("yes", add_special_tokens=False)["input_ids"]
    fake = FakeEndpoint(tiny_target, lambda *_: [*word, tiny_target.eos_ids[-1]])
    with fake.serving():
        ran = run(
            "regenerate", "--data", str(chats), "--endpoint", fake.url, "--prompts", "1",
            "--out", str(tmp_path / "out"),
        )  # fmt: skip
    assert ran.code == 0, ran.err
    (line,) = lines_of(tmp_path / "out")
    said = [m["content"] for m in line["messages"]]
    assert said == ["What is a list?", "yes", "And a tuple?", "yes"]
    assert sum(line["loss_mask"]) == 2 * (len(word) + 1)
    assert len(fake.asked) == 2


def test_a_chat_target_writes_questions_and_answers(run: Any, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([f"hello world, how are you {i}?\n" for i in range(40)], 300, 256)
    tokenizer.chat_template = TEMPLATE
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", EOS])
    model = build_model(num_layers=2, vocab=len(tokenizer), eos_token_id=ends, bos_token_id=0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "target")
    words = ["regenerate", "--target", tmp_path / "target", "--data", "self", "--prompts", "3"]
    words += ["--max-new-tokens", "5", "--out", tmp_path / "out", "--set", "train.seq_len=128"]
    ran = run(*words)
    assert ran.code == 0, ran.err
    assert "self: 3 questions written by the target" in ran.err
    questions = (tmp_path / "out" / "data" / "self-prompts.jsonl").read_text().splitlines()
    asked = [json.loads(line)["messages"][0] for line in questions]
    assert [line["messages"][0] for line in lines_of(tmp_path / "out")] == asked
    assert "written by the target" not in run(*words).err


def test_self_is_refused_where_no_target_writes(run: Any, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    ran = run("regenerate", "--data", "self", "--endpoint", "http://127.0.0.1:9", *out)
    assert (ran.code, "its layers are elsewhere" in ran.err) == (Exit.RECIPE, True)
    ran = run("regenerate", "--data", "self", *out)  # the embedded target is no chat model
    assert (ran.code, "has no questions to write" in ran.err) == (Exit.RECIPE, True)
    ran = run("vocab-trim", "--draft", tmp_path, "--target", "tiny", "--data", "self", *out)
    assert (ran.code, "no target writes questions here" in ran.err) == (Exit.RECIPE, True)


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path, tiny_target: Target) -> None:
    source = tmp_path / "a.jsonl"
    record = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "tokenizer": "f" * 64}
    source.write_text(json.dumps(record) + "\n")
    recipe = load_recipe("distill", sets=[f"data.source={source}", "data.regenerate=false"])
    with pytest.raises(Exception, match="no sample of the data") as caught:
        prepare(recipe, tiny_target, tmp_path / "run")
    assert "another tokenizer" in caught.value.found  # type: ignore[attr-defined]


def test_what_it_would_ignore_is_refused(run: Any, tmp_path: Path) -> None:
    ran = run("regenerate", "--init", "target", "--out", str(tmp_path / "a"))
    assert (ran.code, "nothing is trained here" in ran.err) == (Exit.RECIPE, True)
    sets = ("--set", "data.regenerate=false")
    assert run("regenerate", *sets, "--out", str(tmp_path / "b")).code == Exit.RECIPE
