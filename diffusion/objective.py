"""The training objective of masked diffusion, LLaDA's equation 3 (https://arxiv.org/abs/2502.09992):

    L = - E over t, x0, xt of  1/t  sum over i with xt[i] = MASK of  log p(x0[i] | xt)

t is uniform in (0, 1] and every token is masked by itself with probability t. L bounds the negative
log-likelihood from above. The t of a batch are spread evenly, as in MDLM
(https://arxiv.org/abs/2406.07524), which changes no expectation and makes the sum less noisy.
Letters: B rows, D hidden width, Q picked rows, S sequence, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.diffusion.model import MaskedLM

LEAST = 1e-3  # of t: 1/t stays finite, as in LLaDA's published training code


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows with some tokens masked: what the model reads, where it is to predict, and 1/t."""

    ids_BS: Tensor
    masked_BS: Tensor
    weight_B1: Tensor


def masked_rows(ids_BS: Tensor, mask_id: int, seed: int, keeps_first: bool) -> MaskedRows:
    """Mask rows at random; the same rows and seed are masked the same way, so that a run that is
    resumed goes on as it would have. `keeps_first`: the first token is never masked (nothing
    stands before it that could predict it, where predictions are shifted)."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + int(ids_BS.sum()))
    count = len(ids_BS)
    spread = (torch.rand(1, generator=random) + torch.arange(count) / count) % 1
    rate_B1 = (LEAST + (1 - LEAST) * spread)[:, None]
    masked_BS = torch.rand(ids_BS.shape, generator=random) < rate_B1
    if keeps_first:
        masked_BS[:, 0] = False
    masked_BS = masked_BS.to(ids_BS.device)
    return MaskedRows(ids_BS.masked_fill(masked_BS, mask_id), masked_BS, 1 / rate_B1)


@dataclass(frozen=True, slots=True)
class MaskedLoss:
    """Summed loss in nats, over `count` tokens; of the `masked` ones, `hits` were ranked first."""

    sum: Tensor
    count: int
    hits: Tensor
    masked: int


def masked_loss(model: MaskedLM, ids_BS: Tensor, seed: int, autocast: bool = False) -> MaskedLoss:
    """The objective over rows of ids."""
    shape = model.diffusion
    rows = masked_rows(ids_BS, shape.mask_id, seed, keeps_first=shape.shifted)
    row_Q, place_Q = rows.masked_BS.nonzero(as_tuple=True)
    with torch.autocast(ids_BS.device.type, dtype=torch.bfloat16, enabled=autocast):
        state_BSD = model(rows.ids_BS)
        logits_QV = model.logits(state_BSD[row_Q, model.source(place_Q)])
    label_Q = ids_BS[row_Q, place_Q]
    loss_Q = F.cross_entropy(logits_QV, label_Q, reduction="none")
    weight_Q = rows.weight_B1.to(loss_Q.device)[row_Q, 0]
    hits = (logits_QV.argmax(-1) == label_Q).sum()
    return MaskedLoss((loss_Q * weight_Q).sum(), ids_BS.numel(), hits, len(row_Q))
