"""MaskedLM: a Llama-shaped transformer that reads a canvas in both directions.

Letters: B rows, D hidden width, E head width, H query heads, J key/value heads, L positions,
T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.diffusion.shape import DiffusionShape
from specctl.models.llama.llama import LlamaModel


class KeptKeys(Protocol):
    """Keys and values of positions that a pass does not compute (`reuse/`)."""

    def joined(self, layer: int, key_BJTE: Tensor, value_BJTE: Tensor) -> tuple[Tensor, Tensor]:
        """Everything that the fed tokens attend to in this layer, their own keys included: two of
        shape [B, J, L, E]."""


class MaskedLM(LlamaModel):
    """The parameters under Llama's names; nothing is causal. `predict` is what decoding reads."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__(shape.llama)
        self.diffusion = shape

    def forward(
        self, ids_BT: Tensor, position_T: Tensor | None = None, kept: KeptKeys | None = None
    ) -> Tensor:
        """The last states of the fed tokens, [B, T, D], after the final norm. `position_T`: where
        they stand in the canvas (None: it is fed whole); `kept`: what else they attend to."""
        eps, body = self.shape.norm_eps, self.model
        x_BTD = body.embed_tokens(ids_BT)
        if position_T is None:
            position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        turn = self.rotary.of(position_T[None], x_BTD.dtype)
        for index, layer in enumerate(body.layers):
            part: Any = layer
            normed_BTD = _norm(x_BTD, part.input_layernorm.weight, eps)
            x_BTD = x_BTD + self._attend(index, part.self_attn, normed_BTD, turn, kept)
            normed_BTD = _norm(x_BTD, part.post_attention_layernorm.weight, eps)
            mlp = part.mlp
            x_BTD = x_BTD + mlp.down_proj(
                F.silu(mlp.gate_proj(normed_BTD)) * mlp.up_proj(normed_BTD)
            )
        return _norm(x_BTD, body.norm.weight, eps)

    def _attend(
        self,
        layer: int,
        part: Any,
        x_BTD: Tensor,
        turn: tuple[Tensor, Tensor],
        kept: KeptKeys | None,
    ) -> Tensor:
        size = self.shape.head_dim
        query, key, value = (
            project(x_BTD).unflatten(-1, (-1, size))
            for project in (part.q_proj, part.k_proj, part.v_proj)
        )
        query, key = (_turned(one, turn).transpose(1, 2) for one in (query, key))
        value = value.transpose(1, 2)
        if kept is not None:
            key, value = kept.joined(layer, key, value)
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        mixed: Tensor = part.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def logits(self, state: Tensor) -> Tensor:
        """Logits of states [..., D]: float32 [..., V]. The mask itself is never a prediction."""
        out = F.linear(state, self.head_weight).float()
        out[..., self.diffusion.mask_id] = -torch.inf
        return out

    def source(self, position: Tensor) -> Tensor:
        """Where the tokens at these positions are predicted: Dream shifts by one, and its first
        token is predicted at its own place."""
        return (position - 1).clamp(min=0) if self.diffusion.shifted else position


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _turned(x_BTHE: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions; `turn` is cos and signed sin."""
    cos, sin = turn
    return x_BTHE * cos + x_BTHE.roll(x_BTHE.shape[-1] // 2, dims=-1) * sin
