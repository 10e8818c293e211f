"""A forward that drafting has begun gives what the whole forward gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core import language_model
from specctl.core.forward.exit_states import ExitStates
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel, LmOut
from specctl.models.compiled import CompiledLM
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama, fast_llama_from_hf
from specctl.models.native.library import library

STARTS, EXIT, LAYERS, SPAN = (5, 9, 6), 2, 4, 13
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])
WAYS = ("compiled", "pytorch", "transformers", "windows")


@pytest.fixture
def make_lm(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(language_model, "LEAST_SAVED", 0.0)

    def make(way: str) -> LanguageModel:
        if way in ("transformers", "windows"):
            return HfLM(make_model("llama" if way == "transformers" else "gemma2"))
        if way == "pytorch":
            monkeypatch.setattr(FastLlama, "_native", lambda self, ids_BT: None)
        lm = fast_llama_from_hf(make_model("llama"))
        assert lm is not None
        return lm

    return make


def filled(lm: LanguageModel) -> SlotKV:
    kv = lm.new_kv(3, SPAN)
    generator = torch.Generator().manual_seed(1)
    for store in (*kv.key_ZJLE, *kv.value_ZJLE):
        store.copy_(torch.randn(store.shape, generator=generator))
    return kv


def aimed(
    lm: LanguageModel, kv: SlotKV, first: int, ids_BT: Tensor, rows: slice, **wanted: Any
) -> Feed:
    """Those tokens of some rows, from their place `first` on; alone a row is written as a slice."""
    starts = [start + first for start in STARTS[rows]]
    slots = tuple(range(3))[rows]
    start_B, T = torch.tensor(starts), ids_BT.shape[1]
    same = starts[0] if len(starts) == 1 else None
    kv.begin(slots, torch.tensor(slots), start_B, T, max(starts) + T, same)
    masks = lm.chain_masks(start_B, T, max(starts) + T)
    return Feed(ids_BT[rows], start_B[:, None] + torch.arange(T), masks, **wanted)


def drafted(lm: LanguageModel, kv: SlotKV, num_read: int, rows: slice) -> ExitStates:
    """The lower layers read the first tokens one behind another."""
    parts, states = SubLayers.span(0, EXIT), []
    for at in range(num_read):
        wanted = {"taps": (EXIT,), "logits": False, "parts": parts}
        feed = aimed(lm, kv, at, IDS[:, at : at + 1], rows, **wanted)
        states.append(lm.run(feed, kv).taps[EXIT])
    return ExitStates(EXIT, torch.cat(states, dim=1))


@pytest.mark.parametrize("num_read", [1, 3, 4])
@pytest.mark.parametrize("rows", [slice(0, 3), slice(0, 1)], ids=["three rows", "one row"])
@pytest.mark.parametrize("way", WAYS)
def test_logits_taps_and_cache_are_those_of_the_whole(
    make_lm: Any, way: str, rows: slice, num_read: int
) -> None:
    lm = make_lm(way)
    whole_kv, kv = filled(lm), filled(lm)
    with torch.inference_mode():
        exits = drafted(lm, kv, num_read, rows)
        outs: list[LmOut | None] = []
        for store, resumes in ((whole_kv, False), (kv, True)):
            feed = aimed(lm, store, 0, IDS, rows, taps=(EXIT, LAYERS))
            outs.append(lm.resume(feed, exits, store) if resumes else lm.run(feed, store))
    whole, found = outs
    assert whole is not None
    assert found is not None
    is_bitwise = way == "compiled" and library().functions is not None
    same = {"rtol": 0.0, "atol": 0.0 if is_bitwise else 2e-5}
    torch.testing.assert_close(found.logits_BTV, whole.logits_BTV, **same)
    for tap in (EXIT, LAYERS):
        torch.testing.assert_close(found.taps[tap], whole.taps[tap], **same)
    pairs = zip(
        (*kv.key_ZJLE, *kv.value_ZJLE), (*whole_kv.key_ZJLE, *whole_kv.value_ZJLE), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, **same)


def test_a_whole_forward_is_made_where_that_is_as_good(
    make_lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taps from below the exit, rounded residuals, recorded rounds, too little to save."""
    lm, rows = make_lm("compiled"), slice(0, 3)
    kv = filled(lm)
    with torch.inference_mode():
        exits = drafted(lm, kv, 3, rows)
        feed = aimed(lm, kv, 0, IDS, rows)
        assert lm.resume(aimed(lm, kv, 0, IDS, rows, taps=(1,)), exits, kv) is None
        assert CompiledLM(lm, "eager").resume(feed, exits, kv) is None
        weights = EXIT * 32 * (2 * 6 * 8 + 3 * 64)
        monkeypatch.setattr(language_model, "LEAST_SAVED", 9.0 * weights)
        assert lm.resume(feed, exits, kv) is not None
        monkeypatch.setattr(language_model, "LEAST_SAVED", 9.0 * weights + 1)
        assert lm.resume(feed, exits, kv) is None
        monkeypatch.setattr(language_model, "LEAST_SAVED", 0.0)
        if lm.is_native(feed.ids_BT):
            lm.module.to(torch.bfloat16)
            assert lm.resume(feed, exits, kv) is None
