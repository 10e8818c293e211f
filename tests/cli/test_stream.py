"""Streaming: only whole characters, nothing of a stop string, and the exact text in the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specctl.cli.app.stream import TextStream

TEXT = "na\u00efve caf\u00e9 \u4e2d\u6587 \U0001f600 end"


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: every id is a byte."""
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_characters_are_held_back(seed: int) -> None:
    rng, stream, ids = random.Random(seed), TextStream(decode_bytes), list(TEXT.encode())
    shown = ""
    while ids:
        count = rng.randint(1, 3)
        piece = stream.feed(ids[:count])
        del ids[:count]
        assert "\ufffd" not in piece
        shown += piece
        assert TEXT.startswith(shown)
    assert shown + stream.finish(TEXT) == TEXT


def test_an_unfinished_character_at_the_end_is_shown_by_finish() -> None:
    stream = TextStream(decode_bytes)
    assert stream.feed(list(b"ab\xe4")) == ""
    assert stream.finish("ab\ufffd") == "ab\ufffd"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode_bytes, stop=("\n\n", "END"))
    assert stream.feed(list(b"one\n")) == "one"
    assert stream.feed(list(b"two E")) == "\ntwo "
    assert stream.feed(list(b"N")) == ""
    assert stream.feed(list(b"D more")) == ""
    assert stream.finish("one\ntwo ") == ""


def test_held_text_that_was_no_stop_string_comes_later() -> None:
    stream = TextStream(decode_bytes, stop=("END",))
    assert stream.feed(list(b"EN")) == ""
    assert stream.feed(list(b"D".replace(b"D", b"T"))) == "ENT"


def test_words_keep_their_spaces() -> None:
    """A tokenizer that drops the leading space of whatever it decodes first."""
    words = ["the", "cat", "sat"]

    def decode(ids: Sequence[int]) -> str:
        return " ".join(words[i] for i in ids)

    stream = TextStream(decode)
    assert "".join(stream.feed([i]) for i in range(3)) == "the cat sat"
