"""Incremental text: what is given out piece by piece is the text of the whole, never taken back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.runtime.generate import trim_stop
from specctl.runtime.server.text import AnswerText, Speech
from specctl.runtime.target.target import Target
from specctl_testing.runtime.byte_fallback import byte_fallback_tokenizer
from specctl_testing.runtime.serving import stub_target

TEXTS = (
    "plain words, then more",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 end",
    "\u4f60\u597d\uff0c\u4e16\u754c \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "a\u2028b\u2029c\x85d",
    "e\u0301 \ufffd kept \x00 too",
    "  two spaces\n\n\tand a tab ",
    "",
)
STOPS = (
    (),
    ("wor",),
    ("\n\n", "\u4e16"),
    ("d",),
    (" end", "en"),
    ("\u05dc\u05d5", "zz"),
    ("\u2028",),
)


@pytest.fixture(scope="module")
def speeches():
    """Byte-level pieces, and words with byte fallback."""
    target = stub_target()
    other = Target(
        "bytes", None, target.lm, byte_fallback_tokenizer(), "", None, None, target.eos_ids
    )
    return {"byte-level": Speech(target), "byte-fallback": Speech(other)}


KINDS = ("byte-level", "byte-fallback")


def streamed(speech, tokens, stops):
    stream = AnswerText(speech, stops)
    spans = [stream.add(token) for token in tokens]
    return spans, stream.end()


def check(speech, tokens, stops):
    """The whole is the text of all tokens, which end where a stop string is complete; and nothing
    is taken back on the way."""
    for count in range(len(tokens)):
        if any(stop in speech.decode(tokens[:count]) for stop in stops):
            tokens = tokens[:count]
            break
    spans, rest = streamed(speech, tokens, stops)
    whole = trim_stop(speech.decode(tokens), stops)
    assert "".join(spans) + rest == whole
    for count in range(len(tokens) + 1):
        so_far = "".join(spans[:count])
        assert whole.startswith(so_far)


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text_in_every_script(speeches, kind, stops):
    for text in TEXTS:
        check(speeches[kind], speeches[kind].target.encode(text), stops)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text_of_any_tokens_whatever(speeches, kind):
    """Random tokens: broken characters, special tokens in the midst of one, runs of bytes."""
    speech, rng = speeches[kind], random.Random(0)
    special = sorted(speech.special_ids)
    bytes_ = sorted(speech.byte_ids) or list(range(6, 262))
    for _ in range(400):
        pools = [bytes_, special, range(3, 290), bytes_]
        tokens = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(12))]
        check(speech, tokens, rng.choice(STOPS))


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=12), stop=st.text(min_size=1, max_size=3))
def test_pieces_join_to_any_text_with_any_stop(speeches, text, stop):
    for speech in speeches.values():
        check(speech, speech.target.encode(text), (stop,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_comes_whole_or_not_at_all(speeches, kind):
    speech = speeches[kind]
    tokens = speech.target.encode("ok \U0001f600 \u4f60 ok")
    spans, rest = streamed(speech, tokens, ())
    assert "\ufffd" not in "".join(spans) + rest
    assert sum(span == "" for span in spans) >= 5, "parts of characters are held back"


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_begin_a_stop_string_is_held_until_it_is_clear(speeches, kind):
    speech = speeches[kind]
    tokens = speech.target.encode("ab ab abc")
    spans, rest = streamed(speech, tokens, ("abc",))
    assert "".join(spans) + rest == "ab ab "
    spans, rest = streamed(speech, tokens, ("abcd",))
    assert not "".join(spans).endswith("abc")
    assert "".join(spans) + rest == "ab ab abc"


def test_an_answer_without_a_tokenizer_has_no_text(make_target):
    spans, rest = streamed(Speech(make_target(num_layers=1)), [1, 2, 3], ("x",))
    assert (spans, rest) == (["", "", ""], "")
