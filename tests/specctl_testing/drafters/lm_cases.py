"""What the tests of language models share: ids, a whole forward, how far two outputs lie apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specctl.core.forward.masks import chain_mask
from specctl.core.language_model import LanguageModel, LmOut, Masks


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(1))


def whole(lm: LanguageModel, ids_BS: Tensor, **fields: Any) -> LmOut:
    """A causal forward without a cache."""
    B, S = ids_BS.shape
    zero_B = torch.zeros(B, dtype=torch.long)
    masks = Masks(chain_mask(zero_B, S, S), {w: chain_mask(zero_B, S, S, w) for w in lm.windows})
    return lm.dense(ids_BS, torch.arange(S).expand(B, S), masks, **fields)


def difference(a: LmOut, b: LmOut) -> float:
    """Largest absolute difference of logits and taps."""
    assert a.logits_BTV is not None
    assert b.logits_BTV is not None
    found = [a.logits_BTV - b.logits_BTV, *(a.taps[k] - b.taps[k] for k in a.taps)]
    return max(float(d.abs().max()) for d in found)
