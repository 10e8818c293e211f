"""Llama's pieces over named tensors in float64, for the readers: nothing of the drafters' own
forward is used, so that a mistake there cannot hide one here.

Whole rows are computed anew at every step; under a causal mask that is what a cache gives.
Letters: D hidden width, E head width, H query heads, I input width, L positions, S sequence (the
context), T fed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Tensor]
LLAMA3_FACTORS = ("low_freq_factor", "high_freq_factor", "factor")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What a config says of every layer."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    theta: float
    scaling: Mapping[str, float] | None = None  # of Llama 3's positions


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x_HTE: Tensor, position_T: Tensor, sizes: LayerSizes) -> Tensor:
    """Half-rotation rope ("neox" style)."""
    E = x_HTE.shape[-1]
    turns = sizes.theta ** (-torch.arange(0, E, 2, dtype=x_HTE.dtype) / E)
    if sizes.scaling is not None:
        turns = _as_llama3(turns, sizes.scaling)
    angle_TE = (position_T.to(x_HTE.dtype)[:, None] * turns).repeat(1, 2)
    first, second = x_HTE.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_HTE * angle_TE.cos() + turned * angle_TE.sin()


def _as_llama3(turns: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Slow turns are slower by the factor, fast ones as they are, those between a mixture by how
    often they go round within the original length."""
    low, high, factor = (scaling[key] for key in LLAMA3_FACTORS)
    rounds = scaling["original_max_position_embeddings"] * turns / (2 * math.pi)
    kept = ((rounds - low) / (high - low)).clamp(0, 1)
    return kept * turns + (1 - kept) * turns / factor


def attention(
    tensors: Tensors,
    name: str,
    x_TI: Tensor,
    sizes: LayerSizes,
    context_SI: Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """[T, D]: attention of consecutive rows to themselves, or of rows that stand behind a context,
    whose keys and values are made of other inputs, and by other projections where the checkpoint
    has them (`k_proj_target`); to the newest `window` rows, itself counted."""
    num_before = 0 if context_SI is None else len(context_SI)
    position_L = torch.arange(num_before + len(x_TI))
    query = _heads(tensors, f"{name}.q", x_TI, sizes)
    key = _heads(tensors, f"{name}.k", x_TI, sizes, context_SI)
    value = _heads(tensors, f"{name}.v", x_TI, sizes, context_SI)
    query = rotated(query, position_L[num_before:], sizes)
    key = rotated(key, position_L, sizes)
    group = sizes.heads // sizes.kv_heads
    key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
    scores = query @ key.transpose(-1, -2) * sizes.head_dim**-0.5
    apart_TL = position_L[num_before:, None] - position_L
    hidden_TL = apart_TL < 0 if is_causal else torch.zeros_like(apart_TL, dtype=torch.bool)
    if window is not None:
        hidden_TL |= apart_TL >= window
    out_HTE = scores.masked_fill(hidden_TL, -torch.inf).softmax(-1) @ value
    return F.linear(out_HTE.transpose(0, 1).flatten(1), tensors[f"{name}.o_proj.weight"])


def _heads(
    tensors: Tensors, name: str, x_TI: Tensor, sizes: LayerSizes, context_SI: Tensor | None = None
) -> Tensor:
    """[H, S + T, E]: a projection of the context and of the rows behind it, normed where the
    checkpoint has a norm for it."""
    own = tensors[f"{name}_proj.weight"]
    out_TI = F.linear(x_TI, own)
    if context_SI is not None:
        weight = tensors.get(f"{name}_proj_target.weight", own)
        out_TI = torch.cat([F.linear(context_SI, weight), out_TI])
    out_THE = out_TI.view(len(out_TI), -1, sizes.head_dim)
    if f"{name}_norm.weight" in tensors:
        out_THE = rms_norm(out_THE, tensors[f"{name}_norm.weight"], sizes.eps)
    return out_THE.transpose(0, 1)


def mlp(tensors: Tensors, name: str, x_TD: Tensor) -> Tensor:
    """SwiGLU."""
    gate = F.silu(F.linear(x_TD, tensors[f"{name}.gate_proj.weight"]))
    inner = gate * F.linear(x_TD, tensors[f"{name}.up_proj.weight"])
    return F.linear(inner, tensors[f"{name}.down_proj.weight"])


def onward(tensors: Tensors, name: str, x_TD: Tensor, attended_TD: Tensor, eps: float) -> Tensor:
    """[T, D]: the residual behind a layer, given what its attention adds."""
    x_TD = x_TD + attended_TD
    normed_TD = rms_norm(x_TD, tensors[f"{name}.post_attention_layernorm.weight"], eps)
    return x_TD + mlp(tensors, f"{name}.mlp", normed_TD)


def layer_shapes(
    name: str, sizes: LayerSizes, input_width: int, qk_norm: bool
) -> dict[str, list[int]]:
    """Names and shapes of one layer's attention, MLP and the norm between them."""
    D, E = sizes.width, sizes.head_dim
    shapes = {
        f"{name}.self_attn.q_proj.weight": [sizes.heads * E, input_width],
        f"{name}.self_attn.k_proj.weight": [sizes.kv_heads * E, input_width],
        f"{name}.self_attn.v_proj.weight": [sizes.kv_heads * E, input_width],
        f"{name}.self_attn.o_proj.weight": [D, sizes.heads * E],
        f"{name}.post_attention_layernorm.weight": [D],
        f"{name}.mlp.gate_proj.weight": [sizes.inner, D],
        f"{name}.mlp.up_proj.weight": [sizes.inner, D],
        f"{name}.mlp.down_proj.weight": [D, sizes.inner],
    }
    norms = {f"{name}.self_attn.{part}_norm.weight": [E] for part in ("q", "k")}
    return shapes | norms if qk_norm else shapes
