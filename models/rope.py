"""Rotary positions of a draft model: those of its target, for its own head width.

Scaled positions (llama3, yarn, linear) are computed by transformers from `ModelSpec.rope_scaling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.spec import ModelSpec
from specctl.models.llama.llama import default_inv_freq


@dataclass(frozen=True, slots=True)
class Rope:
    """float32 frequencies [head width / 2] and the factor on cos and sin."""

    inv_freq: Tensor
    scale: float = 1.0


def rope_of(spec: ModelSpec, head_dim: int, theta: float) -> Rope:
    """The positions of `spec` for heads of this width."""
    with torch.device("cpu"):
        if spec.rope_scaling is None:
            return Rope(default_inv_freq(head_dim, theta))
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=spec.max_positions,
            rope_parameters={**spec.rope_scaling, "rope_theta": theta},
        )
        rotary = LlamaRotaryEmbedding(config=config)
    return Rope(rotary.inv_freq.detach().float(), float(rotary.attention_scaling))


def scaled_frequencies(spec: ModelSpec, head_dim: int, theta: float) -> tuple[float, ...]:
    """The frequencies of a target whose positions are scaled as Llama 3's are (cos and sin are not,
    unlike yarn's); another target has none to share."""
    kind = (spec.rope_scaling or {}).get("rope_type", "default")
    if kind != "llama3":
        raise IncompatibleError(
            "the target has no positions that a drafter can share",
            found=f"rope_type {kind}",
            expected="rope_type llama3",
            do="write scaled_rope: false",
            where="drafter.options.scaled_rope",
        )
    return tuple(rope_of(spec, head_dim, theta).inv_freq.tolist())
