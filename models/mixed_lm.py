"""MixedLM: two models that read the same tokens, as one whose logits are made of both.

The law of the mixture is a function of what both say of the next token
(runtime/target/variants/mixture.py), so it is a target like any other: each model has a cache of
its own, both are aimed and kept alike, and whatever drafts for the mixture is verified against its
law.
Letters: B rows, D hidden width, P path, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.forward.exit_states import ExitStates
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut, Masks

# (log p_BTV of the model, log q_BTV of the one beside it) -> log-scores of the mixture
Mixing = Callable[[Tensor, Tensor], Tensor]


class MixedKV(SlotKV):
    """The first model's store, with that of the one `beside` it, which is kept alike."""

    beside: SlotKV

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.beside.clear(slot)

    def keep(self, slot_B: Tensor, kept_len_B: Tensor, path_BP: Tensor) -> None:
        super().keep(slot_B, kept_len_B, path_BP)
        self.beside.keep(slot_B, kept_len_B, path_BP)


class MixedLM(LanguageModel):
    """`lm`, whose shape, states and borrowed pieces it has, and the model `beside` it of the same
    vocabulary. Texts are as long as both models allow."""

    def __init__(self, lm: LanguageModel, beside: LanguageModel, mixing: Mixing) -> None:
        for one in (lm, beside):
            if one.state_bytes or not one.can_run:
                raise IncompatibleError(
                    "a mixture needs two models of attention alone",
                    found=f"{type(one.module).__name__}, whose recurrent states move once a round"
                    if one.state_bytes
                    else f"{type(one.module).__name__}, which can only be read here",
                    expected="models that keep keys and values",
                    do="leave out --mix, or name models of attention alone",
                )
        self.lm, self.beside, self.mixing, self.module = lm, beside, mixing, lm.module
        longest = min(lm.spec.max_positions, beside.spec.max_positions)
        self.spec = replace(lm.spec, max_positions=longest)
        self.windows = tuple(sorted({*lm.windows, *beside.windows}))

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        """Both models read the tokens. Extra rows and additions are the first model's alone."""
        out = self.lm.run(self._seen_by(feed, self.lm), kv)
        if feed.parts is not None:
            return out
        other = None
        if kv is not None:
            assert isinstance(kv, MixedKV), "new_kv() makes the caches of both models"
            other = kv.beside
            other.follow(kv)
        theirs = replace(feed, taps=(), residual_BTD=None, added=())
        found = self.beside.run(self._seen_by(theirs, self.beside), other)
        if out.logits_BTV is None or found.logits_BTV is None:
            return out
        log_p_BTV, log_q_BTV = (
            one.float().log_softmax(-1) for one in (out.logits_BTV, found.logits_BTV)
        )
        scores_BTV = self.mixing(log_p_BTV, log_q_BTV)
        if feed.residual_BTD is not None and feed.only is None:  # extra rows, which q cannot read
            num_extra = feed.residual_BTD.shape[1]
            scores_BTV = torch.cat([scores_BTV[:, :-num_extra], log_p_BTV[:, -num_extra:]], dim=1)
        return LmOut(scores_BTV, out.taps)

    def _seen_by(self, feed: Feed, lm: LanguageModel) -> Feed:
        """The same feed, with the masks that this model has windows for."""
        if self.windows == lm.windows:
            return feed
        windows = {size: feed.masks.windows[size] for size in lm.windows}
        return replace(feed, masks=Masks(feed.masks.full, windows))

    def resume(self, feed: Feed, exits: ExitStates, kv: SlotKV) -> LmOut | None:
        """None: what drafting has read is the first model's alone."""
        return None

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        layers, devices = self.kv_layers, self.kv_devices
        kv = MixedKV.of(layers, num_slots, max_len, self.dtype, self.device, devices)
        assert isinstance(kv, MixedKV)
        kv.beside = self.beside.new_kv(num_slots, max_len)
        return kv

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        return self.lm.kv_layers

    @property
    def kv_bytes(self) -> int:
        return self.lm.kv_bytes + self.beside.kv_bytes

    def run_width(self, num_rows: int, width: int) -> int:
        return self.lm.run_width(num_rows, width)

    def read_kv(self, layer: int, kv: SlotKV) -> tuple[Tensor, Tensor]:
        return self.lm.read_kv(layer, kv)

    def check_unchanged(self) -> None:
        self.lm.check_unchanged()
        self.beside.check_unchanged()

    def borrowed(self) -> Borrowed:
        """The first model's pieces. Its layers are run apart from the mixture."""
        return self.lm.borrowed()
