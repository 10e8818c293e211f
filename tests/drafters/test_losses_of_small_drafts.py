"""What LK losses are for: a draft too small to be right everywhere, which has to choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import LinearHead, LossOptions, head_loss

CONTEXTS, VOCAB = 6, 16


def acceptance(kind: str, logits_CV: Tensor) -> float:
    """Mean alpha over contexts, in all of which the draft says the same, after training with that
    loss."""
    every_C = torch.arange(CONTEXTS)
    rows = AlignedRows(every_C, torch.zeros_like(every_C), every_C, logits_CV)
    state_CD, weight_VD = torch.ones(CONTEXTS, 1), torch.zeros(VOCAB, 1, requires_grad=True)
    optimizer = torch.optim.Adam([weight_VD], lr=0.05)
    for _ in range(150):
        out = head_loss(state_CD, LinearHead(weight_VD), rows, None, LossOptions(kind))
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()
    q_CV = (state_CD @ weight_VD.detach().T).softmax(-1)
    return float(torch.minimum(logits_CV.softmax(-1), q_CV).sum(-1).mean())


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["lk_alpha", "lk_hybrid"])
def test_of_a_draft_that_is_too_small_more_is_accepted_than_with_kl(kind: str) -> None:
    found = []
    for seed in range(6):
        source = torch.Generator().manual_seed(seed)
        logits_CV = 3.0 * torch.randn(CONTEXTS, VOCAB, generator=source)
        found.append(acceptance(kind, logits_CV) - acceptance("kl", logits_CV))
    by_target = torch.tensor(found)
    error = by_target.std() / len(by_target) ** 0.5
    assert by_target.mean() > 4 * error
