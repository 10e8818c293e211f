"""LatticeNet: two layers over all candidates of all slots of a block (LiLiCorr, arXiv 2608.20530).

A node is the j-th likeliest token of slot k: its embedding, the slot's state, and five features of
its rank made of log p, p, log p minus the slot's largest, j / (C - 1) and whether j = 0. All nodes
attend to all, with a bias per distance of slots. Each ends as two unit vectors: `enter` is compared
with the `leave` of the candidate before it, that of the first slot with one of the context alone.
Letters: C candidates, D hidden width, E head width, F figures (the features), H query heads, I
input width (of the lattice), M new nodes (P C), O output width (of a vector), P path, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.drafters.nets.blocks import RmsNorm

NUM_FEATURES = 5
STD = 0.02  # of embeddings and of the last maps, which must not begin at zero: cosines of nothing


@dataclass(frozen=True, slots=True)
class LatticeShape:
    """`context`: the width of what it reads (states, embeddings, features of the text). Vectors
    shorter than `eps` are not lengthened to one."""

    context: int
    width: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor: int
    num_slots: int
    candidates: int
    eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Vectors:
    """Unit vectors: leave and enter [X, P, C, O] of the nodes, leave [X, O] of the root."""

    leave_XPCO: Tensor
    enter_XPCO: Tensor
    root_XO: Tensor


class LatticeAttention(nn.Module):
    """All to all, with a bias."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x_XMI: Tensor, bias_HMM: Tensor) -> Tensor:
        made = F.linear(x_XMI, self.in_proj_weight, self.in_proj_bias)
        query, key, value = (
            torch.unflatten(part, -1, (self.num_heads, -1)).transpose(1, 2)
            for part in made.chunk(3, -1)
        )
        bias = bias_HMM.to(query.dtype).expand(len(query), -1, -1, -1)
        out_XHME = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        out_XMI: Tensor = self.out_proj(out_XHME.transpose(1, 2).flatten(2))
        return out_XMI


class LatticeLayer(nn.Module):
    """Attention and MLP, each behind its norm."""

    def __init__(self, shape: LatticeShape) -> None:
        super().__init__()
        width, inner = shape.width, int(shape.width * shape.mlp_ratio)
        self.attn_norm = RmsNorm(width, shape.norm_eps)
        self.attn = LatticeAttention(width, shape.num_heads)
        self.mlp_norm = RmsNorm(width, shape.norm_eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, x_XMI: Tensor, bias_HMM: Tensor) -> Tensor:
        x_XMI = x_XMI + self.attn(self.attn_norm(x_XMI), bias_HMM)
        out_XMI: Tensor = x_XMI + self.mlp(self.mlp_norm(x_XMI))
        return out_XMI


class LatticeNet(nn.Module):
    """Parameter names of the published head."""

    def __init__(self, shape: LatticeShape) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.token_proj = (
            nn.Identity() if shape.context == width else nn.Linear(shape.context, width)
        )
        self.pass_hidden_proj = nn.Linear(shape.context, width)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(NUM_FEATURES),
            nn.Linear(NUM_FEATURES, width),
            nn.SiLU(),
            nn.Linear(width, width),
        )
        self.slot_embedding = nn.Parameter(STD * torch.randn(1, 1, shape.num_slots, 1, width))
        self.rank_embedding = nn.Parameter(STD * torch.randn(1, 1, 1, shape.candidates, width))
        self.relative_slot_bias = nn.Parameter(
            torch.zeros(shape.num_heads, 2 * shape.num_slots + 1)
        )
        self.same_slot_bias = nn.Parameter(torch.zeros(shape.num_heads))
        self.context_proj = nn.Linear(shape.context, width)
        self.layers = nn.ModuleList(LatticeLayer(shape) for _ in range(shape.num_layers))
        self.output_norm = RmsNorm(width, shape.norm_eps)
        self.anchor_norm = RmsNorm(width, shape.norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, shape.factor)
        self.in_head = nn.Linear(width, shape.factor)
        self.anchor_out_head = nn.Linear(width, shape.factor)
        for head in (self.out_head, self.in_head, self.anchor_out_head):
            nn.init.normal_(head.weight, std=STD)

    def forward(
        self, embedding_XPCD: Tensor, logp_XPC: Tensor, states_XPD: Tensor, before_XD: Tensor
    ) -> Vectors:
        P, C = logp_XPC.shape[1:]
        x_XPCI = self.token_proj(embedding_XPCD) + self.pass_hidden_proj(states_XPD)[:, :, None]
        x_XPCI = x_XPCI + self.feature_mlp(_features(logp_XPC).to(x_XPCI))
        x_XPCI = x_XPCI + self.slot_embedding[:, 0, :P] + self.rank_embedding[:, 0, :, :C]
        x_XMI, bias_HMM = x_XPCI.flatten(1, 2), self.bias(P, C)
        for layer in self.layers:
            x_XMI = layer(x_XMI, bias_HMM)
        x_XPCI = torch.unflatten(self.output_norm(x_XMI), 1, (P, C))
        is_there_X1 = (before_XD != 0).any(-1, keepdim=True)  # else no token has been read yet
        context_XI = self.anchor_norm(self.context_proj(before_XD) * is_there_X1)
        beside = context_XI[:, None, None].expand_as(x_XPCI)
        made = F.silu(self.factor_input_proj(torch.cat([x_XPCI, beside, x_XPCI * beside], -1)))
        given = self.out_head(made), self.in_head(made), self.anchor_out_head(context_XI)
        return Vectors(*(F.normalize(x, dim=-1, eps=self.shape.eps) for x in given))

    def bias(self, num_slots: int, count: int) -> Tensor:
        """[H, M, M]: by how many slots the query stands behind the key."""
        slot_M = torch.arange(num_slots, device=self.same_slot_bias.device)
        slot_M = slot_M.repeat_interleave(count)
        apart_MM = slot_M[:, None] - slot_M
        bias_HMM = self.relative_slot_bias[:, apart_MM + self.shape.num_slots]
        return bias_HMM + self.same_slot_bias[:, None, None] * (apart_MM == 0)


def _features(logp_XPC: Tensor) -> Tensor:
    """[X, P, C, F] of candidates that stand best first."""
    count = logp_XPC.shape[-1]
    rank_C = torch.arange(count, device=logp_XPC.device, dtype=logp_XPC.dtype)
    parts = [
        logp_XPC,
        logp_XPC.exp(),
        logp_XPC - logp_XPC.amax(-1, keepdim=True),
        (rank_C / max(count - 1, 1)).expand_as(logp_XPC),
        (rank_C == 0).to(logp_XPC.dtype).expand_as(logp_XPC),
    ]
    return torch.stack(parts, dim=-1)
