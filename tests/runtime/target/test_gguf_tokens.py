"""The tokenizer of a GGUF file: ids as llama.cpp makes them, ends of text, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from specctl.core.errors import IncompatibleError, IntegrityError, SpecctlError
from specctl.core.storage.gguf_header import GgufHeader
from specctl.runtime.target.gguf.pretokenizers import ALSO, KNOWN, pre_named, pre_of
from specctl.runtime.target.gguf.tokens import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    ends_in_file,
    tokenizer_of,
)
from specctl.runtime.target.templates.ends import SPELLING
from specctl.runtime.target.templates.spoken_to import why_text

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ["12", "he", "hey", "</", "s>", "</s>"]
MERGES = ["1 2", "h e", "he y", "< /", "s >", "</ s>"]
MORE = {
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "    ": USER_DEFINED,
    "wholeword": NORMAL,
    "[PAD268]": UNUSED,
}
TOKENS = [*BYTES, *MERGED, *MORE]
ID = {token: number for number, token in enumerate(TOKENS)}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def header(**fields: Any) -> GgufHeader:
    """A file with that tokenizer; None takes a field out."""
    known: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [MORE.get(token, NORMAL) for token in TOKENS],
        "merges": MERGES,
        "bos_token_id": ID["<|im_start|>"],
        "eos_token_id": ID["<|endoftext|>"],
    }
    known |= fields
    named = {f"tokenizer.ggml.{name}": value for name, value in known.items() if value is not None}
    path = Path("model.gguf")
    return GgufHeader(path, {**named, "tokenizer.chat_template": TEMPLATE}, {}, (path,))


def ids(text: str, **fields: Any) -> list[int]:
    return list(tokenizer_of(header(**fields))(text)["input_ids"])


def test_the_name_of_a_split_decides_which_tokens_a_text_becomes() -> None:
    assert ids("12") == [ID["12"]]
    assert ids("12", pre="smollm") == [ID["1"], ID["2"]]


def test_every_name_that_llama_cpp_has_stands_for_a_split_that_is_known() -> None:
    assert all(pre_named(other) is KNOWN[name] for name in ALSO for other in ALSO[name])
    assert pre_named("bloom") is None


@pytest.mark.parametrize("name", KNOWN)
def test_a_tokenizer_that_was_read_is_written_under_the_name_of_its_split(name: str) -> None:
    found = pre_of(json.loads(tokenizer_of(header(pre=name)).backend_tokenizer.to_str()))
    assert found is not None
    assert pre_named(found) == KNOWN[name]


def test_control_tokens_and_those_of_users_are_found_whole() -> None:
    tokenizer = tokenizer_of(header())
    text = "hey<|im_end|>    12"
    found = tokenizer(text)["input_ids"]
    assert found == [ID["hey"], ID["<|im_end|>"], ID["    "], ID["12"]]
    assert tokenizer.decode(found, skip_special_tokens=False) == text
    assert tokenizer.decode(found, skip_special_tokens=True) == "hey    12"


def test_a_piece_that_is_a_token_is_taken_whole_where_merges_are_ignored() -> None:
    assert ids("wholeword", pre="llama3", add_bos_token=False) == [ID["wholeword"]]
    assert len(ids("wholeword")) == len("wholeword") - len("he") + 2  # letters: no merge is in it


def test_texts_begin_with_bos_where_the_split_or_the_file_says_so() -> None:
    bos = ID["<|im_start|>"]
    assert ids("12", pre="llama-bpe")[0] == bos
    assert ids("12", pre="llama-bpe", add_bos_token=False) == [ID["12"]]
    assert ids("12", add_bos_token=True) == [bos, ID["12"]]
    with pytest.raises(IntegrityError, match="does not name"):
        ids("12", pre="llama-bpe", bos_token_id=None)


def test_padding_of_the_vocabulary_is_no_token() -> None:
    vocabulary = tokenizer_of(header()).get_vocab()
    assert set(TOKENS) - set(vocabulary) == {"[PAD268]"}


def test_ends_are_those_named_and_tokens_spelled_like_ends() -> None:
    found = ends_in_file(header(), len(TOKENS))
    assert found.ids == (ID["<|endoftext|>"], ID["<|im_end|>"])
    assert found.of_turn == ID["<|im_end|>"]
    [turn] = [end for end in found.each if end.token_id == found.of_turn]
    assert SPELLING in turn.sources
    named = ends_in_file(header(eot_token_id=ID["<|im_end|>"]), len(TOKENS))
    assert "gguf" in {source for end in named.each[1:] for source in end.sources}


def test_an_ordinary_word_that_looks_like_an_end_ends_nothing() -> None:
    assert ID["</s>"] not in ends_in_file(header(), len(TOKENS)).ids
    types = [CONTROL if t == "</s>" else MORE.get(t, NORMAL) for t in TOKENS]
    assert ID["</s>"] in ends_in_file(header(token_type=types), len(TOKENS)).ids


def test_a_file_is_a_chat_model_where_it_names_the_end_of_its_template() -> None:
    base, chat = header(), header(eos_token_id=ID["<|im_end|>"])
    assert why_text(tokenizer_of(base), ends_in_file(base, len(TOKENS))) is not None
    assert why_text(tokenizer_of(chat), ends_in_file(chat, len(TOKENS))) is None


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"tokens": None}, IncompatibleError, "no tokenizer"),
        ({"model": "llama"}, IncompatibleError, "sentencepiece"),
        ({"model": "t5"}, IncompatibleError, "unigram"),
        ({"model": "new"}, IncompatibleError, "tokenizer.ggml.model new"),
        ({"pre": "bloom"}, IncompatibleError, "tokenizer.ggml.pre bloom"),
        ({"pre": "default"}, IncompatibleError, "tokenizer.ggml.pre default"),
        ({"pre": None}, IncompatibleError, "no tokenizer.ggml.pre"),
        ({"tokens": [*TOKENS, "12"], "token_type": None}, IntegrityError, "twice"),
        ({"token_type": [1]}, IntegrityError, "1 types"),
        ({"merges": ["1 3"]}, IntegrityError, "1 3"),
        ({"merges": [12]}, IntegrityError, "12"),
        ({"eos_token_id": 1 << 20}, IntegrityError, "1,048,576"),
    ],
)
def test_tokenizers_that_would_be_guessed_are_refused(
    fields: dict[str, Any], kind: type[SpecctlError], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        ids("12", **fields)
    assert caught.value.do
