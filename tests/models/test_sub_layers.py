"""Borrowed layers: what runs apart is what runs together, in the fast forward and in transformers'
own, with a cache of the borrower's and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.forward.sub_layers import NOTHING, SubLayers
from specctl.core.language_model import Feed, LanguageModel
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import fast_llama_from_hf

LAYERS, WIDTH = 4, 32
SOME = SubLayers((0, 2, 3), (0, 1, 3))
ONE_SET = {"whole": None, "some": SOME, "span": SubLayers.span(0, 2), "none": NOTHING}
OTHERS = ("gemma2", "gpt_neox", "phi", "gpt2", "mistral", "qwen3_moe")
Make = Callable[..., Any]


def ids_of(rows: int, length: int) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def feed(lm: LanguageModel, ids_BT: Tensor, **fields: Any) -> Feed:
    position_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    return Feed(ids_BT, position_BT, lm.document_masks(torch.zeros_like(ids_BT)), **fields)


@pytest.mark.parametrize("parts", ONE_SET)
def test_the_fast_forward_and_transformers_leave_out_the_same(make_model: Make, parts: str) -> None:
    model = make_model("llama")
    fast, slow, ids = fast_llama_from_hf(model), HfLM(model), ids_of(2, 7)
    assert fast is not None
    taps = tuple(range(LAYERS + 1))
    with torch.no_grad():
        ours, theirs = (lm.run(feed(lm, ids, taps=taps, parts=ONE_SET[parts]), None)
                        for lm in (fast, slow))  # fmt: skip
    torch.testing.assert_close(ours.logits_BTV, theirs.logits_BTV, rtol=1e-4, atol=1e-4)
    for tap in taps:
        torch.testing.assert_close(ours.taps[tap], theirs.taps[tap], rtol=1e-4, atol=1e-4)
    if parts == "none":  # the embeddings under the last norm and the LM head
        assert torch.equal(ours.taps[0], ours.taps[LAYERS - 1])


@pytest.mark.parametrize("kind", ["llama", *OTHERS])
def test_layers_in_two_pieces_are_the_model(make_target: Make, kind: str) -> None:
    """The lower ones, then the upper ones from their residual, then the head alone."""
    lm, ids = make_target(kind, num_layers=LAYERS).lm.borrowed().layers(), ids_of(2, 7)
    nowhere = torch.zeros_like(ids)
    with torch.no_grad():
        whole = lm.run(feed(lm, ids, taps=(2, 3)), None)
        low = lm.run(feed(lm, ids, taps=(2,), parts=SubLayers.span(0, 2), logits=False), None)
        torch.testing.assert_close(low.taps[2], whole.taps[2], rtol=1e-5, atol=1e-5)
        upper = SubLayers.span(2, LAYERS)
        out = lm.run(feed(lm, nowhere, taps=(3,), parts=upper, residual_BTD=low.taps[2]), None)
    torch.testing.assert_close(out.logits_BTV, whole.logits_BTV, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.taps[3], whole.taps[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox"])
def test_keys_written_from_states_are_those_of_the_forward(make_target: Make, kind: str) -> None:
    """Rows of different lengths, and a layer that no one borrows."""
    lm, ids = make_target(kind, num_layers=LAYERS).lm.borrowed().layers(), ids_of(2, 6)
    kept, slots, attention = torch.tensor([0, 3]), torch.tensor([1, 0]), (0, 2)
    whole, own = lm.new_kv(2, 16), lm.borrowed_kv(attention, 2, 16)
    assert own.key_ZJLE[1].numel() == 0
    position = kept[:, None] + torch.arange(6)
    masks = lm.chain_masks(kept, 6, 9)
    with torch.no_grad():
        whole.begin((1, 0), slots, kept, 6, 9)
        taps = lm.run(Feed(ids, position, masks, (0, 1, 2, 3)), whole).taps
        own.begin((1, 0), slots, kept, 6, 9)
        lm.write_kv({layer: taps[layer] for layer in attention}, position, own)
    for layer in attention:
        for mine, theirs in (
            (own.key_ZJLE[layer], whole.key_ZJLE[layer]),
            (own.value_ZJLE[layer], whole.value_ZJLE[layer]),
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_module_is_left_as_it_was(make_model: Make) -> None:
    lm, ids = HfLM(make_model("qwen2")), ids_of(1, 5)
    with torch.no_grad():
        before = lm.run(feed(lm, ids), None).logits_BTV
        with pytest.raises(RuntimeError):  # of another width
            lm.run(feed(lm, ids, parts=SOME, residual_BTD=torch.zeros(1, 5, 8)), None)
        assert torch.equal(lm.run(feed(lm, ids), None).logits_BTV, before)


def test_a_target_that_lends_no_layers_says_so(make_target: Make) -> None:
    lends = make_target("llama").borrowed()
    with pytest.raises(IncompatibleError, match="does not lend its layers"):
        replace(lends, lm=None).layers()


def test_evenly_spread_layers_keep_the_first_and_the_last() -> None:
    assert SubLayers.evenly(8, 4).attention == (0, 2, 5, 7)
    assert SubLayers.evenly(8, 1).mlp == (0,)
    assert SubLayers.without(4, (1,), (2,)).skipped(4) == ((1,), (2,))
    assert SubLayers.without(4, (1,), (2, 3)).share(4) == 5 / 8


def test_what_is_fed_learns_through_frozen_layers(make_model: Make) -> None:
    """Embeddings fed in place of tokens, some layers left out, a cache behind: the same gradient in
    both forwards, and none for the model."""
    model, found = make_model("llama").requires_grad_(False), []
    fast, slow = fast_llama_from_hf(model), HfLM(model)
    assert fast is not None
    with torch.no_grad():
        fast.run(feed(fast, ids_of(1, 4)), None)  # fused copies are there
    for lm in (fast, slow):
        fed_1TD = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(2))
        fed_1TD.requires_grad_()
        kv, start_1 = lm.borrowed_kv(SOME.attention, 1, 8), torch.full((1,), 2)
        kv.begin((0,), torch.zeros(1, dtype=torch.long), start_1, 3, 5, 2)
        masks, position_1T = lm.chain_masks(start_1, 3, 5), 2 + torch.arange(3)[None]
        out = lm.run(Feed(ids_of(1, 3), position_1T, masks, (), True, None, SOME, fed_1TD), kv)
        assert out.logits_BTV is not None
        out.logits_BTV.log_softmax(-1)[..., 5].sum().backward()  # type: ignore[no-untyped-call]
        assert fed_1TD.grad is not None
        found.append(fed_1TD.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert float(found[0].norm()) > 0.1
    assert all(weight.grad is None for weight in model.parameters())
