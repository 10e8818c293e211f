"""Decoder-layer pieces for feature-level drafters, with the parameter names of the public formats.

`Eagle3Layer` is the EAGLE-3 layer: its attention reads cat(norm(embedding), norm(state)), twice as
wide as the model, and the un-normed state is the residual stream (a switch makes it the normed).
Rotary positions follow the half-rotation convention of transformers' Llama.
Letters: B rows, D hidden width, E head width, H query heads, I input width, J key/value
heads, L positions, S sequence, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.spec import ModelSpec
from specctl.drafters.attention.attention import attend_seen
from specctl.drafters.attention.seen import KeySet, Seen, SeenPart, SeenWindow
from specctl.drafters.nets.routed import Router
from specctl.models import kernels

Attending = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value -> attended


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one decoder layer. `inv_freq` are the frequencies of its positions where those of
    `rope_theta` are scaled, else None."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    inv_freq: tuple[float, ...] | None = None

    @classmethod
    def of(cls, spec: ModelSpec, intermediate: int | None = None) -> LayerShape:
        """A layer of the target's own shape, or with another MLP."""
        return cls(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            intermediate or spec.intermediate_size,
            spec.norm_eps,
            spec.rope_theta,
        )

    @property
    def kv(self) -> KVShape:
        """What a cache keeps of a token."""
        return KVShape(self.num_kv_heads, self.head_dim, self.num_kv_heads, self.head_dim)

    def rope(self, position: Tensor) -> Tensor:
        """[..., 2, E]: the rotation of these positions."""
        return rotary(position, self.head_dim, self.rope_theta, self.inv_freq)


class RmsNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, self.weight.dtype)  # one kernel where they are alike
        out = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return out.to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotary(
    position: Tensor, head_dim: int, theta: float, inv_freq: tuple[float, ...] | None = None
) -> Tensor:
    """[..., 2, E] float32: cosines, and sines whose first half is negated (see `rotate`)."""
    if inv_freq is None:
        half = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32)
        frequency = theta ** (-half / head_dim)
    else:
        frequency = torch.tensor(inv_freq, device=position.device, dtype=torch.float32)
    angle = position[..., None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=-2)


def rotate(x_BHTE: Tensor, rope_BT2E: Tensor) -> Tensor:
    """Rotate queries or keys by `rotary` of their positions."""
    cos, sin = rope_BT2E[:, None, :, 0].to(x_BHTE.dtype), rope_BT2E[:, None, :, 1].to(x_BHTE.dtype)
    E = x_BHTE.shape[-1]
    swapped = torch.cat([x_BHTE[..., E // 2 :], x_BHTE[..., : E // 2]], dim=-1)
    return torch.addcmul(x_BHTE * cos, swapped, sin)


def attend(query_BHTE: Tensor, key_BHLE: Tensor, value_BHLE: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, H * E]: attention under a [B, 1, T, L] mask (None = everything); the query heads of
    one key/value head are folded into the query axis, so nothing is repeated."""
    B, H, T, E = query_BHTE.shape
    out = kernels.attend(query_BHTE, key_BHLE, value_BHLE, mask)
    return out.transpose(1, 2).reshape(B, T, H * E)


def attend_chains(
    query_BHSE: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    seen: Seen | SeenPart | SeenWindow,
    *beside: KeySet,
) -> Tensor:
    """[B, S, H * E]: attention of training-time-test step j = len(keys) - 1 (EAGLE-3, sec. 3.2).

    Row t sees the true rows of step 0 that `seen` shows it, and of each later step only its own
    entry: that entry stands for the token drafted i positions after row t. Keys and values of step
    0 are those of whole rows (`seen.gathered`). `beside`: what it sees beside them.
    """
    later = zip(keys[1:], values[1:], strict=True)
    own = [KeySet(*pair, None) for pair in later]
    return attend_seen(query_BHSE, [*seen.sets(keys[0], values[0]), *own, *beside])


def sink_pair(key_BJLE: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, J, length, E] of sinks: a key that no query but
    its sink scores (see `models.hf.foreign_layer`), without a value."""
    B, J, _, E = key_BJLE.shape
    value_BJLE = key_BJLE.new_zeros(B, J, length, E)
    return torch.cat([value_BJLE[..., :-1], value_BJLE[..., -1:] + 1], dim=-1), value_BJLE


class Eagle3Attention(nn.Module):
    """Projections of an attention whose input is `input_width` wide."""

    def __init__(self, shape: LayerShape, input_width: int, qk_norm: bool) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_width, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, kv_width, bias=False)
        self.v_proj = nn.Linear(input_width, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.has_qk_norm = qk_norm
        self.q_norm = RmsNorm(shape.head_dim, shape.norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps) if qk_norm else nn.Identity()

    def query(self, x_BTI: Tensor, rope_BT2E: Tensor) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x_BTI))), rope_BT2E)

    def key_value(self, x_BTI: Tensor, rope_BT2E: Tensor) -> tuple[Tensor, Tensor]:
        key = rotate(self.k_norm(self._heads(self.k_proj(x_BTI))), rope_BT2E)
        return key, self._heads(self.v_proj(x_BTI))

    def injected(self, x_BSI: Tensor, rope_BS2E: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of features that stand before the rows; like theirs unless a family has
        projections of its own for them."""
        return self.key_value(x_BSI, rope_BS2E)

    def _heads(self, x_BTI: Tensor) -> Tensor:
        B, T, _ = x_BTI.shape
        return x_BTI.view(B, T, -1, self.shape.head_dim).transpose(1, 2)


class Eagle3Layer(nn.Module):
    """The EAGLE-3 decoder layer; the caller owns keys and values and does the attention. The state
    is the residual stream as it comes, or with `norm_before_residual` behind its norm."""

    def __init__(
        self, shape: LayerShape, qk_norm: bool = False, norm_before_residual: bool = False
    ) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        width = shape.hidden_size
        self.input_layernorm = RmsNorm(width, shape.norm_eps)
        self.hidden_norm = RmsNorm(width, shape.norm_eps)
        self.self_attn = Eagle3Attention(shape, 2 * width, qk_norm)
        self.post_attention_layernorm = RmsNorm(width, shape.norm_eps)
        self.mlp = Mlp(width, shape.intermediate_size)

    def mix(self, embedding_BTD: Tensor, state_BTD: Tensor) -> Tensor:
        """[B, T, 2D]: what attention reads."""
        return torch.cat([self.input_layernorm(embedding_BTD), self.hidden_norm(state_BTD)], dim=-1)

    def finish(self, state_BTD: Tensor, attended_BTI: Tensor) -> Tensor:
        """Output state: both residual additions."""
        residual_BTD = self.hidden_norm(state_BTD) if self.norm_before_residual else state_BTD
        h_BTD = residual_BTD + self.self_attn.o_proj(attended_BTI)
        out: Tensor = h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))
        return out


def attending(
    mask: Tensor | Seen | SeenPart | None, kv: SlotKV | None = None, layer: int = 0
) -> Attending:
    """Under that mask, to each other or to all that stands in the aimed cache of that layer."""

    def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if kv is not None:
            key, value = kv.update(layer, key, value)
        if isinstance(mask, (Seen, SeenPart)):
            return attend_seen(query, mask.sets(mask.gathered(key), mask.gathered(value)))
        return attend(query, key, value, mask)

    return look


class DecoderLayer(nn.Module):
    """A Llama layer of its own: norm (or none), attention, norm, MLP. Fresh, it is the identity."""

    def __init__(self, shape: LayerShape, input_norm: bool = True) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RmsNorm(width, eps) if input_norm else nn.Identity()
        self.self_attn = Eagle3Attention(shape, width, qk_norm=False)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = Mlp(width, shape.intermediate_size)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x_BTD: Tensor, rope_BT2E: Tensor, attending: Attending) -> Tensor:
        """`attending` decides what these tokens attend to: each other, or a cache as well."""
        attention, normed = self.self_attn, self.input_layernorm(x_BTD)
        key, value = attention.key_value(normed, rope_BT2E)
        attended = attending(attention.query(normed, rope_BT2E), key, value)
        return self.finish(x_BTD + attention.o_proj(attended))

    def finish(self, h_BTD: Tensor) -> Tensor:
        """The layer behind its attention."""
        out: Tensor = h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))
        return out


class FeatureNet(nn.Module):
    """EAGLE-3's module, parameter names of the public format: `fc` fuses the taps, one wide layer,
    a final norm, an LM head of `rows` rows. The layer starts at random: as the identity behind the
    highest tap it learns more slowly (benchmarks/eagle3_switches.py)."""

    def __init__(
        self,
        shape: LayerShape,
        taps: tuple[int, ...],
        rows: int,
        *,
        fc_norm: bool,
        norm_output: bool,
        qk_norm: bool,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        width = shape.hidden_size
        self.fc_norm: nn.ModuleList | None = None
        if fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(width, shape.norm_eps) for _ in taps)
        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(shape, qk_norm, norm_before_residual)])
        self.norm = RmsNorm(width, shape.norm_eps)
        self.lm_head = nn.Linear(width, rows, bias=False)
        self.router: Router | None = None
        self.shape, self.taps, self.norm_output = shape, taps, norm_output

    @property
    def layer(self) -> Eagle3Layer:
        return cast(Eagle3Layer, self.layers[0])

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        """[..., taps * D]: what `fc` reads of the target's features; g is its output."""
        chosen = [taps[tap].to(self.fc.weight.dtype) for tap in self.taps]
        if self.fc_norm is not None:
            chosen = [norm(tap) for norm, tap in zip(self.fc_norm, chosen, strict=True)]
        return torch.cat(chosen, dim=-1)

    def rope(self, position: Tensor) -> Tensor:
        return self.shape.rope(position)
