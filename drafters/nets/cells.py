"""Recurrent cells: how a token that was just drafted enters what a head remembers.

Letters: D hidden width, E head width, H query heads, X any axes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ElmanCell(nn.Module):
    """s' = SiLU(W e + b + U s) (Recurrent Drafter)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Linear(width, width)
        self.state = nn.Linear(width, width, bias=False)

    def forward(self, state_XD: Tensor, embedding_XD: Tensor) -> Tensor:
        return F.silu(self.token(embedding_XD) + self.state(state_XD))


class SumCell(nn.Module):
    """s' = s + e: what is remembered has no order."""

    def forward(self, state_XD: Tensor, embedding_XD: Tensor) -> Tensor:
        return state_XD + embedding_XD


class CosineCell(nn.Module):
    """s' = s + the token's values, each head's weighed by the cosine of query and key (Clover).

    Attention to a single key, where softmax would always be one: the gate is how far state and
    token agree. Queries and keys begin as the inputs themselves, values as zero, so that a fresh
    cell hands the state through.
    """

    def __init__(self, width: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.num_heads, self.eps = num_heads, eps
        nn.init.eye_(self.query.weight)
        nn.init.eye_(self.key.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, state_XD: Tensor, embedding_XD: Tensor) -> Tensor:
        normed_XD = F.rms_norm(state_XD, state_XD.shape[-1:], None, self.eps)
        query_XHE, key_XHE, value_XHE = (
            x.unflatten(-1, (self.num_heads, -1))
            for x in (self.query(normed_XD), self.key(embedding_XD), self.value(embedding_XD))
        )
        gate_XH1 = F.cosine_similarity(query_XHE, key_XHE, dim=-1)[..., None]
        return state_XD + torch.flatten(gate_XH1 * value_XHE, -2)
