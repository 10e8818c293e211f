"""What a prompt may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specctl.api.arguments.prompts import are_chats, chat_note, empty_answers, encode_prompts
from specctl.core.errors import SpecctlError
from specctl.runtime.generate import Output
from specctl_testing.runtime.chat_targets import spoken_with

HI = {"role": "user", "content": "Hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}


def ids_of(target, prompts):
    return [prompt.ids for prompt in encode_prompts(target, prompts)]


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2],
        (1, 2),
        torch.tensor([1, 2]),
        torch.tensor([[1, 2]]),
        np.array([1, 2]),
        np.array([[1, 2]], dtype=np.int32),
        [np.int64(1), np.int32(2)],
        list(torch.tensor([1, 2])),
        [torch.tensor([1, 2])],
        [[1, 2]],
        iter([1, 2]),
        {"input_ids": torch.tensor([[1, 2]])},
        {"input_ids": [[0, 1, 2]], "attention_mask": [[0, 1, 1]]},
    ],
)
def test_ids_come_in_any_form(tiny_target, prompt):
    assert ids_of(tiny_target, prompt) == [(1, 2)]


def test_several_prompts_come_in_any_iterable(tiny_target):
    two = [(1, 2), (3, 4)]
    for prompts in (torch.tensor(two), np.array(two), [torch.tensor(one) for one in two]):
        assert ids_of(tiny_target, prompts) == two
    texts = encode_prompts(tiny_target, (text for text in ("import", "def")))
    assert [prompt.text for prompt in texts] == ["import", "def"]


@pytest.mark.parametrize("prompt", [[HI], HI, [[HI]], {"messages": [HI]}, [PARTS], PARTS])
def test_conversations_may_have_their_text_in_parts(tiny_target, prompt):
    assert ids_of(tiny_target, prompt) == [tuple(tiny_target.encode_chat([HI]))]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        b"import",
        torch.tensor([1.0, 2.0]),
        torch.tensor([True]),
        torch.zeros(1, 1, 1, dtype=torch.long),
        [1.5],
        [True, False],
        [None],
        {"a": 1},
        [-1],
        [2**40],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": 5}],
    ],
)
def test_anything_else_is_refused_with_what_is_expected(tiny_target, prompt):
    with pytest.raises(SpecctlError) as caught:
        encode_prompts(tiny_target, prompt)
    assert caught.value.where == "prompts"
    assert caught.value.found
    assert caught.value.expected


def test_a_chat_model_reads_a_text_as_a_turn_and_raw_continues_it(tiny_target):
    chatty = spoken_with(tiny_target)
    [turn] = encode_prompts(chatty, "Hi")
    assert turn.ids == tuple(chatty.encode_chat([HI]))
    assert turn.is_chat
    [text] = encode_prompts(chatty, "Hi", chat=False)
    assert text.ids == tuple(chatty.encode("Hi"))
    assert not text.is_chat


def test_a_base_model_continues_a_text_and_chat_makes_it_a_turn(tiny_target):
    [text] = encode_prompts(tiny_target, "Hi")
    assert text.ids == tuple(tiny_target.encode("Hi"))
    [turn] = encode_prompts(tiny_target, "Hi", chat=True)
    assert turn.ids == tuple(tiny_target.encode_chat([HI]))


def test_chat_without_a_template_is_refused(tiny_target):
    with pytest.raises(SpecctlError, match="has no chat template"):
        encode_prompts(spoken_with(tiny_target, None), "Hi", chat=True)


def test_token_ids_are_read_as_they_are_by_chat_models(tiny_target):
    [prompt] = encode_prompts(spoken_with(tiny_target), [1, 2])
    assert prompt.ids == (1, 2)
    assert not prompt.is_chat


def test_what_was_encoded_is_taken_as_it_is(tiny_target):
    encoded = encode_prompts(tiny_target, ["Hi", [HI]])
    assert encode_prompts(spoken_with(tiny_target), encoded) == encoded
    assert are_chats(encoded) is None
    assert [are_chats([prompt]) for prompt in encoded] == [False, True]


def test_a_note_says_how_texts_are_read_unless_somebody_chose(tiny_target):
    chatty = spoken_with(tiny_target)
    note = chat_note(chatty, None)
    assert note is not None
    assert "--raw" in note
    assert chat_note(chatty, True) is None
    assert chat_note(chatty, False) is None
    assert chat_note(tiny_target, None) is None


@pytest.mark.parametrize(
    ("template", "chat", "words"),
    [("", False, "must follow"), ("own", False, "--chat makes"), ("own", True, "ended its turn")],
)
def test_an_empty_answer_says_why_and_what_to_do(tiny_target, template, chat, words):
    target = spoken_with(tiny_target) if template else spoken_with(tiny_target, None)
    prompts = encode_prompts(target, ["Hi", "Ho"], chat=chat)
    outputs = [Output("Hi", "\n", (5,), "eos"), Output("Ho", "x", (9, 5), "eos")]
    [warning] = empty_answers(target, prompts, outputs)
    assert warning.startswith("1 of 2 answers are empty: tiny")
    assert words in warning
    assert empty_answers(target, prompts[1:], outputs[1:]) == []
    stopped = [Output("Hi", "", (5,), "stop")]
    assert empty_answers(target, prompts[:1], stopped) == []
