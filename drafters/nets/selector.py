"""Choosing among the likeliest candidates of each slot: what corrections share whose distribution
is over C tokens only. Outside them it is -inf, so that a policy draws from, and reports, the
truncated distribution: verification is then exact for every other token, too.
Letters: C candidates, D hidden width, K draft vocabulary, M new nodes, P path, Q picked rows, X any
axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.drafters.losses.teacher import wide


@dataclass(frozen=True, slots=True)
class BestTokens:
    """Draft rows of the likeliest tokens, best first, and their logits: [X, P, C] of slots."""

    rows: Tensor
    values: Tensor

    @classmethod
    def of(cls, base_XPK: Tensor, count: int) -> BestTokens:
        best = base_XPK.topk(min(count, base_XPK.shape[-1]), dim=-1)
        return cls(best.indices, best.values)


def spread(scores_XMC: Tensor, rows_XMC: Tensor, num_rows: int) -> Tensor:
    """[X, M, K]: these scores at their draft rows, -inf elsewhere."""
    blank = scores_XMC.new_full((*scores_XMC.shape[:-1], num_rows), -torch.inf)
    return blank.scatter(-1, rows_XMC, scores_XMC)


@torch.no_grad()
def forced_in(rows_QC: Tensor, label_Q: Tensor) -> Tensor:
    """[Q, C]: the candidates; a label that is none of them takes the last one's place. While
    training only: a draft is never shown the text."""
    is_there_Q = (rows_QC == label_Q[:, None]).any(-1)
    last_Q = torch.where(is_there_Q, rows_QC[:, -1], label_Q)
    return torch.cat([rows_QC[:, :-1], last_Q[:, None]], dim=-1)


def choice_loss(scores_QC: Tensor, rows_QC: Tensor, label_Q: Tensor) -> Tensor:
    """[Q]: cross-entropy of the label among the candidates."""
    at_Q = (rows_QC == label_Q[:, None]).to(torch.int8).argmax(-1)
    return F.cross_entropy(wide(scores_QC), at_Q, reduction="none")
