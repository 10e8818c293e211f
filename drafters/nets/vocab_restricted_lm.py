"""VocabRestrictedLM: a draft model as a model of its own over the target's ids, so that the engine
can let it write text. What it cannot say has no chance. Letters: B rows, T fed tokens, K draft
vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.drafter import Borrowed
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel, LmOut
from specctl.core.vocab import VocabMap


class VocabRestrictedLM(LanguageModel):
    """`readable` takes target ids into the draft's embedding, `spoken` cuts its logits to the
    draft vocabulary; both are the drafter's own."""

    def __init__(
        self,
        lm: LanguageModel,
        num_ids: int,
        vocab: VocabMap | None,
        readable: Callable[[Tensor], Tensor],
        spoken: Callable[[Tensor], Tensor],
    ) -> None:
        self.lm, self.module, self.windows = lm, lm.module, lm.windows
        self.spec = replace(lm.spec, vocab_size=num_ids)
        self._vocab, self._readable, self._spoken = vocab, readable, spoken

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        out = self.lm.run(replace(feed, ids_BT=self._readable(feed.ids_BT)), kv)
        if out.logits_BTV is None:
            return out
        logits_BTK = self._spoken(out.logits_BTV)
        if self._vocab is None:
            return LmOut(logits_BTK, out.taps)
        shape = (*logits_BTK.shape[:-1], self.spec.vocab_size)
        logits_BTV = logits_BTK.new_full(shape, -torch.inf)
        logits_BTV[..., self._vocab.ids_K] = logits_BTK
        return LmOut(logits_BTV, out.taps)

    def borrowed(self) -> Borrowed:
        return self.lm.borrowed()

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        return self.lm.new_kv(num_slots, max_len)
