"""What a prompt may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specctl.api.prompts import encode_prompts
from specctl.core.errors import SpecctlError

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
