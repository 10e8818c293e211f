"""Our attention kernel as transformers calls it."""

from __future__ import annotations

import torch
from torch import nn

from specctl.models.hf.hf_lm import _attention


def test_no_mask_means_every_token_sees_all_before_it() -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    query = query[:, :, -3:]  # the last three of five tokens
    causal = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None]
    found, _ = _attention(nn.Identity(), query, key, value, None)
    wanted, _ = _attention(nn.Identity(), query, key, value, causal)
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, _attention(nn.Identity(), query, key, value, causal | True)[0])
