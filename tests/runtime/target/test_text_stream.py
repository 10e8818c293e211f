"""Incremental text: what is given out piece by piece is the text of the whole, never taken back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.runtime.target.target import Target
from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder, whole_text
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
def targets():
    """Byte-level pieces, and words with byte fallback."""
    target = stub_target()
    other = Target(
        "bytes", None, target.lm, byte_fallback_tokenizer(), "", None, None, target.eos_ids
    )
    return {"byte-level": target, "byte-fallback": other}


KINDS = ("byte-level", "byte-fallback")


def streamed(decoder, tokens, stops):
    stream = TextStream(decoder, stops)
    spans = [stream.add(token) for token in tokens]
    return spans, stream.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_from_another(targets, kind):
    """The space in front of its first word is kept, unlike that of a text of its own."""
    target = targets[kind]
    decoder = TokenDecoder.of(target)
    begun, new = target.encode("the first"), target.encode("the first words of two")
    assert new[: len(begun)] == begun
    stream = TextStream(decoder, (" two",), begun=begun)
    assert stream.position == 0
    assert "".join(map(stream.add, new[len(begun) :])) + stream.end() == " words of"


def trim_stop(text, stops):
    """The text before the first stop string."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def check(decoder, tokens, stops):
    """The whole is the text of all tokens, which end where a stop string is complete; and nothing
    is taken back on the way."""
    for count in range(len(tokens)):
        if any(stop in decoder.decode(tokens[:count]) for stop in stops):
            tokens = tokens[:count]
            break
    spans, rest = streamed(decoder, tokens, stops)
    whole = trim_stop(decoder.decode(tokens), stops)
    assert "".join(spans) + rest == whole
    for count in range(len(tokens) + 1):
        so_far = "".join(spans[:count])
        assert whole.startswith(so_far)


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text_in_every_script(targets, kind, stops):
    decoder = TokenDecoder.of(targets[kind])
    for text in TEXTS:
        check(decoder, targets[kind].encode(text), stops)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text_of_any_tokens_whatever(targets, kind):
    """Random tokens: broken characters, special tokens in the midst of one, runs of bytes."""
    decoder, rng = TokenDecoder.of(targets[kind]), random.Random(0)
    special = sorted(decoder.special_ids)
    bytes_ = sorted(decoder.byte_ids) or list(range(6, 262))
    for _ in range(400):
        pools = [bytes_, special, range(3, 290), bytes_]
        tokens = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(12))]
        check(decoder, tokens, rng.choice(STOPS))


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=12), stop=st.text(min_size=1, max_size=3))
def test_pieces_join_to_any_text_with_any_stop(targets, text, stop):
    for target in targets.values():
        check(TokenDecoder.of(target), target.encode(text), (stop,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_comes_whole_or_not_at_all(targets, kind):
    tokens = targets[kind].encode("ok \U0001f600 \u4f60 ok")
    spans, rest = streamed(TokenDecoder.of(targets[kind]), tokens, ())
    assert "\ufffd" not in "".join(spans) + rest
    assert sum(span == "" for span in spans) >= 5, "parts of characters are held back"


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_begin_a_stop_string_is_held_until_it_is_clear(targets, kind):
    decoder, tokens = TokenDecoder.of(targets[kind]), targets[kind].encode("ab ab abc")
    spans, rest = streamed(decoder, tokens, ("abc",))
    assert "".join(spans) + rest == "ab ab "
    spans, rest = streamed(decoder, tokens, ("abcd",))
    assert not "".join(spans).endswith("abc")
    assert "".join(spans) + rest == "ab ab abc"


def test_an_answer_without_a_tokenizer_has_no_text(make_target):
    spans, rest = streamed(TokenDecoder.of(make_target(num_layers=1)), [1, 2, 3], ("x",))
    assert (spans, rest) == (["", "", ""], "")


# -- a tokenizer whose every id is a byte ---------------------------------------------------------

OF_BYTES = TokenDecoder(lambda ids: bytes(ids).decode("utf-8", errors="replace"))


def test_an_unfinished_character_at_the_end_comes_at_the_end() -> None:
    assert streamed(OF_BYTES, b"ab\xe4", ()) == (["a", "b", ""], "\ufffd")


def test_what_follows_a_stop_string_is_never_given_out() -> None:
    spans, rest = streamed(OF_BYTES, b"one\ntwo END more", ("\n\n", "END", ""))
    assert ("".join(spans), rest) == ("one\ntwo ", "")


def test_held_text_that_was_no_stop_string_comes_later() -> None:
    assert streamed(OF_BYTES, b"ENT", ("END",)) == (["", "", "ENT"], "")


def test_words_keep_their_spaces() -> None:
    """A tokenizer that drops the leading space of whatever it decodes first."""
    words = ["the", "cat", "sat"]
    decoder = TokenDecoder(lambda ids: " ".join(words[i] for i in ids))
    assert streamed(decoder, range(3), ()) == (["the", " cat", " sat"], "")


# -- where tokens begin ----------------------------------------------------------------------------


def starts(decoder, tokens, stops=()):
    stream, found = TextStream(decoder, stops), []
    for token in tokens:
        found.append(stream.position)
        stream.add(token)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_begins_where_the_text_before_it_ends_whatever_is_held_back(targets, kind):
    target = targets[kind]
    decoder, text = TokenDecoder.of(target), "import os\nimport sys and more"
    tokens = target.encode(text)
    expected = [len(decoder.decode(tokens[:at])) for at in range(len(tokens))]
    for stops in ((), ("\nimport o",), ("import os\nimport sys and m0",)):
        assert starts(decoder, tokens, stops) == expected


def test_parts_of_a_character_begin_where_it_stands() -> None:
    assert starts(OF_BYTES, "a\u4f60b\U0001f600".encode()) == [0, 1, 1, 1, 2, 3, 3, 3, 3]
    fallback = TokenDecoder(OF_BYTES.decode, {i: i for i in range(128, 256)})
    assert starts(fallback, "a\u4f60\u597d!".encode()) == [0, 1, 1, 1, 2, 2, 2, 3]


# -- stop strings that spell control tokens --------------------------------------------------------


MARKED = TokenDecoder(
    lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
    special_ids={300: "<end>", 301: "<user>", 302: "<x>"},
)


def of_words(tokens, stops, keeps_stop=False):
    stream = TextStream(MARKED, stops, keeps_stop)
    return "".join(map(stream.add, tokens)) + stream.end(), stream.stop


SPELLED = [
    ([*b"ab", 300], ("<end>",), "ab", "<end>"),
    ([*b"ab", 301, *b"c"], ("<end>", "<user>"), "ab", "<user>"),
    ([*b"ab\n", 300, *b"c"], ("\n<end>",), "ab", "\n<end>"),
    ([*b"ab", 300, *b"\n", *b"c"], ("<end>\n",), "ab", "<end>\n"),
    ([*b"ab", 300, *b"c"], ("<end>\n",), "abc", None),
    ([*b"ab", 300, 301, *b"c"], ("<end><user>",), "ab", "<end><user>"),
    ([*b"a<end>b"], ("<end>",), "a", "<end>"),
    ([*b"a", 302, *b"b"], ("ab",), "", "ab"),
    ([*b"xa", 302, *b"bc"], ("bd", "<x>d"), "xabc", None),
    ([*b"one two", 300], ("two", "<end>"), "one ", "two"),
]


@pytest.mark.parametrize(("tokens", "stops", "text", "stop"), SPELLED)
def test_a_stop_string_that_spells_a_control_token_ends_the_text(tokens, stops, text, stop):
    assert of_words(tokens, stops) == (text, stop)


def test_what_may_go_on_as_such_a_stop_string_is_held_back() -> None:
    stream = TextStream(MARKED, ("c<end>",))
    assert [stream.add(token) for token in (*b"ac", 98, 99)] == ["a", "", "cb", ""]
    assert (stream.add(300), stream.end(), stream.stop) == ("", "", "c<end>")


def test_a_text_may_keep_the_stop_string_and_nothing_behind_it() -> None:
    assert of_words([*b"one two three"], ("two",), keeps_stop=True) == ("one two", "two")
    assert of_words([*b"one", 300, *b"x"], ("<end>",), keeps_stop=True) == ("one<end>", "<end>")
    assert of_words([*b"one"], ("two",), keeps_stop=True) == ("one", None)


def test_a_text_ends_before_the_first_stop_string() -> None:
    assert whole_text(OF_BYTES, b"one two three", ("three", "two")) == "one "
    assert whole_text(OF_BYTES, b"one", ("x", "")) == "one"
