"""Tokenizers in a GGUF file: text is split as the tokenizer splits it, or the export says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from specctl.core.errors import GateError, IncompatibleError
from specctl.export.formats.gguf import FILE
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.layouts.llama_cpp.tokens import PROBES
from specctl.export.layouts.llama_cpp.vocab import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    vocabulary_of,
)
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import exported, shaken
from specctl_testing.export.gguf_cases import LLAMA3, QWEN2, byte_tokenizer, piece_tokenizer

SMALL: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "head_dim": 8,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 24,
}


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    made: Target = make_target(num_layers=2, hidden=16, vocab=330)
    return replace(made, tokenizer_fingerprint="b" * 64, template_digest="c" * 64, eos_ids=(1, 2))


def read(target: Target, tokenizer: Any, out: Path) -> GgufReader:
    """A draft exported with that tokenizer, which passes the check, and read again."""
    same = replace(target, tokenizer=tokenizer)
    exported(shaken("small-lm", same, **SMALL), same, out, "gguf")
    return GgufReader(out / FILE)


@pytest.mark.parametrize(
    ("tokenizer", "pre"),
    [
        ({"split": None}, "gpt-2"),
        ({"split": None, "digits": True}, "starcoder"),
        ({"split": LLAMA3, "ignore_merges": True}, "llama-bpe"),
        ({"split": LLAMA3}, "smaug-bpe"),
        ({"split": QWEN2}, "qwen2"),
    ],
)
def test_a_known_split_gets_its_name(
    tokenizer: dict[str, Any], pre: str, target: Target, tmp_path: Path
) -> None:
    made = byte_tokenizer(**tokenizer)
    tokens = read(target, made, tmp_path / "out").tokens
    assert tokens.pre == pre
    for text in PROBES:
        assert tokens.encode(text) == made.encode(text, add_special_tokens=False)


def test_a_split_without_contractions_gets_the_nearest_name_and_is_told(
    target: Target, tmp_path: Path
) -> None:
    made = byte_tokenizer(LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)|", ""))
    tokens = read(target, made, tmp_path / "out").tokens
    vocabulary = vocabulary_of(made, target.spec)
    assert tokens.pre == "smaug-bpe"
    assert "apostrophe" in (vocabulary.deviation or "")
    assert not vocabulary.is_read_alike("he said 'tell me'")
    alike = [text for text in PROBES if vocabulary.is_read_alike(text)]
    assert len(alike) == len(PROBES) - 1
    for text in alike:
        assert tokens.encode(text) == made.encode(text, add_special_tokens=False)


def test_an_unknown_split_is_said_so(target: Target, tmp_path: Path) -> None:
    made = byte_tokenizer(LLAMA3.replace("{1,3}", "{1,2}"))
    same = replace(target, tokenizer=made)
    drafter = shaken("small-lm", same, **SMALL)
    manifest = exported(drafter, same, tmp_path / "out", "gguf")
    assert GgufReader(tmp_path / "out" / FILE).tokens.pre == "default"
    assert "send prompts as token ids" in manifest.notes[0]
    assert "send prompts as token ids" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("style", ["prepend", "replace", "metaspace"])
def test_sentencepiece_like_tokenizers_become_scores(
    style: str, target: Target, tmp_path: Path
) -> None:
    made = piece_tokenizer(style)
    tokens = read(target, made, tmp_path / "out").tokens
    assert tokens.kind == "llama"
    assert tokens.space_prefix == (style != "replace")
    texts = [*PROBES, "the  thing in a there", "\u4f60\u597d"]
    if style == "metaspace":
        texts = [text for text in texts if not text.startswith(" ")]
    for text in texts:
        assert tokens.encode(text) == made.encode(text, add_special_tokens=False)
    types = vocabulary_of(made, target.spec).types
    assert types[0] == UNKNOWN
    assert types[1:4] == (CONTROL,) * 3
    assert types[4:260] == (BYTE,) * 256
    assert types[-1] == UNUSED
    assert types[made.convert_tokens_to_ids("the")] == NORMAL


def test_llama_cpp_is_told_every_end_of_text(target: Target) -> None:
    made = byte_tokenizer()
    made.chat_template = "{% for m in messages %}{{ m.content }}<|pad|>{% endfor %}"
    spec = replace(target.spec, eos_ids=(1, 0))  # neither names what the template ends turns with
    ids = vocabulary_of(made, spec).special.special_token_ids
    assert {kind: ids.get(kind) for kind in ("eos", "eot", "eom")} == {"eos": 1, "eot": 2, "eom": 0}
    made.chat_template = None
    ids = vocabulary_of(made, replace(target.spec, eos_ids=(1,))).special.special_token_ids
    assert ids["eos"] == 1
    assert not {"eot", "eom"} & set(ids)


def test_wrong_scores_do_not_pass(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gguf.GGUFWriter.add_token_scores
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_token_scores",
        lambda writer, value: right(writer, [-v for v in value]),
    )
    with pytest.raises(GateError, match="becomes"):
        read(target, piece_tokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokenizers_that_llama_cpp_cannot_hold_are_refused_by_name(
    target: Target, tmp_path: Path, word_tokenizer: Any
) -> None:
    cases = {
        "a WordLevel tokenizer": word_tokenizer,
        "the target has no tokenizer": None,
        "another way to write blanks": piece_tokenizer("words"),
        "merges in another order": _with_merges(
            [("h", "e"), ("t", "h"), ("th", "e"), ("e", "r"), ("t", "he")]
        ),
        "no merge of 't' and 'he'": _with_merges([("t", "h"), ("h", "e"), ("th", "e")]),
    }
    for found, tokenizer in cases.items():
        with pytest.raises(IncompatibleError, match=found):
            vocabulary_of(tokenizer, target.spec)


def _with_merges(merges: list[tuple[str, str]]) -> Any:
    """A tokenizer of pieces whose merges are these, whatever they leave out."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    body = json.loads(piece_tokenizer(pieces=()).backend_tokenizer.to_str())
    for left, right in merges:
        body["model"]["vocab"].setdefault(left + right, len(body["model"]["vocab"]))
    body["model"]["merges"] = [list(pair) for pair in merges]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(body)))
