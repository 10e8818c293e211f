"""QueryNet: decoder layers that have queries only; keys and values are another model's.

The layer is that of Gemma 4 without the projections of keys and values (transformers'
`gemma4_assistant`):

    h = x + norm(W_o Attention(rotate(norm(W_q norm(x))), K, V));  out = s (h + norm(MLP(norm(h))))

with scores that are not divided by the root of the head width, a gated MLP with tanh-GELU and a
stored factor s (`layer_scalar`). In front stands x = W cat(embedding, state), behind the layers a
norm; the LM head reads what leaves it, and a projection of it back to the width of the target's
state is fed back.
Letters: B rows, D hidden width, E head width, O output width, T fed tokens, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.drafters.nets.blocks import LayerShape, Mlp, RmsNorm, rotate
from specctl.drafters.nets.trunk import TrunkNet

Look = Callable[[Tensor], Tensor]  # query [B, H, T, E] -> attended [B, T, H * E]
FRESH = 0.1  # of what a fresh layer adds to its residual


@dataclass(frozen=True, slots=True)
class QuerySizes:
    """Of all layers; `head_dims`: of the queries of each."""

    width: int
    num_heads: int
    head_dims: tuple[int, ...]
    intermediate: int
    norm_eps: float


class QueryAttention(nn.Module):
    """Queries, their norm, and the way back."""

    def __init__(self, sizes: QuerySizes, head_dim: int) -> None:
        super().__init__()
        inner = sizes.num_heads * head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(sizes.width, inner, bias=False)
        self.q_norm = RmsNorm(head_dim, sizes.norm_eps)
        self.o_proj = nn.Linear(inner, sizes.width, bias=False)
        nn.init.constant_(self.q_norm.weight, head_dim**-0.5)

    def forward(self, x_BTO: Tensor, rope_BT2E: Tensor, look: Look) -> Tensor:
        B, T, _ = x_BTO.shape
        heads = self.q_proj(x_BTO).view(B, T, -1, self.head_dim)
        query = rotate(self.q_norm(heads).transpose(1, 2), rope_BT2E)
        # Kernels divide scores by the root of the head width, which these layers do not.
        out: Tensor = self.o_proj(look(query * self.head_dim**0.5))
        return out


class GeluMlp(Mlp):
    """The same with tanh-GELU as its gate."""

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


class QueryLayer(nn.Module):
    """One layer. Fresh, it adds little to its residual."""

    layer_scalar: Tensor

    def __init__(self, sizes: QuerySizes, head_dim: int) -> None:
        super().__init__()
        self.self_attn = QueryAttention(sizes, head_dim)
        self.mlp = GeluMlp(sizes.width, sizes.intermediate)
        self.input_layernorm = RmsNorm(sizes.width, sizes.norm_eps)
        self.post_attention_layernorm = RmsNorm(sizes.width, sizes.norm_eps)
        self.pre_feedforward_layernorm = RmsNorm(sizes.width, sizes.norm_eps)
        self.post_feedforward_layernorm = RmsNorm(sizes.width, sizes.norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))
        for norm in (self.post_attention_layernorm, self.post_feedforward_layernorm):
            nn.init.constant_(norm.weight, FRESH)

    def forward(self, x_BTO: Tensor, rope_BT2E: Tensor, look: Look) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BTO), rope_BT2E, look)
        h_BTO = x_BTO + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(h_BTO))
        out: Tensor = (h_BTO + self.post_feedforward_layernorm(inner)) * self.layer_scalar
        return out


class QueryNet(TrunkNet):
    """The module, with the names of transformers' `gemma4_assistant` but for the prefix `model.`;
    an LM head of `rows` rows. Fresh, it passes the target's state on to the head."""

    def __init__(self, shape: LayerShape, sizes: QuerySizes, rows: int) -> None:
        nn.Module.__init__(self)
        self.shape, width = shape, sizes.width
        self.pre_projection = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.layers = nn.ModuleList(QueryLayer(sizes, head_dim) for head_dim in sizes.head_dims)
        self.norm = RmsNorm(width, sizes.norm_eps)
        self.post_projection = nn.Linear(width, shape.hidden_size, bias=False)
        self.lm_head = nn.Linear(width, rows, bias=False)
        with torch.no_grad():
            into_OD = self.pre_projection.weight[:, shape.hidden_size :]
            nn.init.orthogonal_(into_OD)
            if width == shape.hidden_size:
                into_OD.copy_(torch.eye(width))
            self.pre_projection.weight[:, : shape.hidden_size].normal_(
                std=0.1 * (2 * shape.hidden_size) ** -0.5
            )
            self.post_projection.weight.copy_(into_OD.T)

    def mix(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        out_XO: Tensor = self.pre_projection(torch.cat([embedding_XD, state_XD], dim=-1))
        return out_XO

    def looked(self, x_BTO: Tensor, ropes: Sequence[Tensor], looks: Sequence[Look]) -> Tensor:
        """[B, T, O]: what the LM head reads; a rotation and what is looked at by layer."""
        for layer, rope_BT2E, look in zip(self.layers, ropes, looks, strict=True):
            x_BTO = layer(x_BTO, rope_BT2E, look)
        out_BTO: Tensor = self.norm(x_BTO)
        return out_BTO

    def fed_back(self, out_XO: Tensor) -> Tensor:
        state_XD: Tensor = self.post_projection(out_XO)
        return state_XD
