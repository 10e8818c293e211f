"""A text that cannot fit the context is refused by its bytes, before any tokenizer reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from specctl.api.arguments.prompts import encode_prompts
from specctl.core.errors import SpecctlError
from specctl.runtime.cross_vocab.token_bytes import ALPHABET
from specctl.runtime.generate import generate
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.prompt_limits import bytes_per_token, check_room, least_tokens
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import error_of, make_app, post

LONG = "ab " * 100_000  # of 1,024 tokens of 35 bytes, 35,840 bytes fit


class Unread:
    """A tokenizer that fails as soon as it is given a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **_: Any) -> list[int]:
        raise AssertionError(f"the tokenizer was called with {len(text)} characters")


@pytest.fixture
def unread(tiny_target: Target) -> Target:
    return replace(tiny_target, tokenizer=Unread(tiny_target.tokenizer))


def byte_level(**parts: Any) -> PreTrainedTokenizerFast:
    letters = sorted(ALPHABET)
    model = BPE({letter: i for i, letter in enumerate([*letters, "ab"])}, [("a", "b")])
    return wrapped(model, **{"pre_tokenizer": pre_tokenizers.ByteLevel(), **parts})


def wrapped(model: Any, **parts: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_every_way_to_a_prompt_refuses_it_unread(unread: Target, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(LONG)
    ways: dict[str, Callable[[], object]] = {
        "generate": lambda: generate(unread, [LONG]),
        "specctl generate": lambda: encode_prompts(unread, LONG),
        "--chat": lambda: encode_prompts(unread, LONG, chat=True),
        "messages": lambda: encode_prompts(unread, [{"role": "user", "content": LONG}]),
        "bench --prompts": lambda: heldout_prompts(unread, 1, path=file),
    }
    for way in ways.values():
        with pytest.raises(SpecctlError, match="does not fit") as caught:
            way()
        assert "at least 8,5" in caught.value.found
        assert caught.value.expected == "at most 1,024 tokens, 35,840 bytes"


def test_the_server_refuses_it_unread(unread: Target) -> None:
    app = make_app(StubService(target=unread))
    chat = {"messages": [{"role": "user", "content": LONG[: len(LONG) // 2]}] * 2}
    texts, url = ({"prompt": LONG}, {"prompt": ["x", LONG]}), "/v1/completions"
    for path, body in (*((url, text) for text in texts), ("/v1/chat/completions", chat)):
        error = error_of(post(app, path, body))
        assert error["code"] == "context_length_exceeded"
        assert "300," in error["message"]
        assert "at least 8,5" in error["message"]


@given(st.text(max_size=200) | st.text("ab -=\n\u0301\u1100", max_size=400))
def test_no_text_has_fewer_tokens(text: str) -> None:
    for tokenizer in (byte_level(), byte_level(normalizer=normalizers.NFC())):
        assert len(tokenizer.encode(text)) >= least_tokens(tokenizer, text)


def test_the_longest_token_is_measured_in_bytes(tiny_target: Target) -> None:
    assert bytes_per_token(tiny_target.tokenizer) == 35
    assert bytes_per_token(byte_level()) == 2
    assert bytes_per_token(byte_level(normalizer=normalizers.NFC())) == 6
    marked = byte_level()
    marked.add_tokens([AddedToken("<caf\u00e9>")])
    assert bytes_per_token(marked) == 7
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    assert bytes_per_token(wrapped(BPE(fallback, [], byte_fallback=True))) == 6


def test_nothing_is_said_of_a_tokenizer_that_may_leave_text_out() -> None:
    letters = {letter: i for i, letter in enumerate(ALPHABET)}
    removing = pre_tokenizers.Split(" ", "removed")
    silent = {
        "words of any length are unknown": wrapped(WordLevel({"a": 0, "?": 1}, unk_token="?")),
        "blanks are removed": byte_level(normalizer=normalizers.Strip()),
        "a split removes": byte_level(
            pre_tokenizer=pre_tokenizers.Sequence([removing, pre_tokenizers.ByteLevel()])
        ),
        "a byte is missing": wrapped(BPE({"a": 0}, []), pre_tokenizer=pre_tokenizers.ByteLevel()),
        "much becomes little": byte_level(normalizer=normalizers.Replace("aaa", "a")),
        "no steps, no bytes": wrapped(BPE(letters, [])),
    }
    for why, tokenizer in silent.items():
        assert bytes_per_token(tokenizer) is None, why
        assert least_tokens(tokenizer, LONG) == 0, why


def test_blanks_that_an_added_token_takes_in_are_not_counted(make_target: Any) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"bos_token": AddedToken("<s>", rstrip=True)})
    text = "<s>" + " " * 3000
    assert len(tokenizer.encode(text)) == 1
    assert least_tokens(tokenizer, text) == 1
    check_room(replace(make_target(), tokenizer=tokenizer), text)
