"""Widen a Llama without changing what it computes; make the rows of a trimmed LM head unreachable.

A serving engine that knows nothing of trimmed vocabularies wants an LM head with one row per target
token, and `LlamaForCausalLM` has no bias on it, so a cut row could always win for some state. Here
is what makes it lose for every input, with nothing but ordinary Llama weights.

Constant channel. Let D be the width, x in R^D the residual stream, S = |x|^2, and let the model be
widened to D' > D, channel D holding the same c > 0 in every embedding row; no layer writes to the
new channels (zero rows in o_proj and down_proj) or reads them (zero columns, zero norm weights).
RMSNorm(x) = w x sqrt(D) / sqrt(S + D eps). The wide norm divides by sqrt((S + c^2) / D' + eps').
With eps' = (D eps - c^2) / D' that is sqrt((S + D eps) / D'), so norm weights w sqrt(D / D') give
exactly the old values: the constant hides inside epsilon, which needs c^2 <= D eps (we take half).

Cut rows. Give the final norm weight 1 on channel D; it then shows c sqrt(D') / sqrt(S + D eps) > 0
for every input. A cut row is zero but for -M on that channel. Kept logits are at least
-B = -sqrt(D) max_i |row_i * w|, so M >= (B + margin) sqrt(R^2 + D eps) / (c sqrt(D')) puts every
cut logit at least `margin` below every kept one, where R bounds |x| over all inputs: the norm in
front of a layer bounds what the layer can add (`residual_bound`). A factor of two covers rounding.
Letters: D hidden width, E head width, K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.models.llama.fast_llama import LlamaShape

MARGIN = 1e4  # below every kept logit: probability 0 in float32 up to temperature 90
MAX_ROW = 1e30  # far from overflow in float32 and bfloat16

_READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_WRITERS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Widened:
    """An ordinary Llama with one LM-head row per target token. `cut_value` is what cut rows hold
    on channel `channel` (None when nothing was cut)."""

    shape: LlamaShape
    tensors: dict[str, Tensor]
    channel: int | None
    cut_value: float | None


def widen(shape: LlamaShape, tensors: Mapping[str, Tensor], kept_K: Tensor | None) -> Widened:
    """The same function over the full vocabulary: rows `kept_K` speak, the others never win.

    The width grows to a multiple of the head count, which transformers demands, and of 8, which
    GPUs like.
    """
    old, step = shape.hidden_size, math.lcm(shape.num_heads, 8)
    if kept_K is None and old % shape.num_heads == 0:
        return Widened(shape, dict(tensors), None, None)
    width = math.ceil((old + (kept_K is not None)) / step) * step
    dtype = tensors["model.embed_tokens.weight"].dtype
    constant = 0.0
    if kept_K is not None:
        constant = float(torch.tensor(math.sqrt(old * shape.norm_eps / 2)).to(dtype))
    eps = (old * shape.norm_eps - constant**2) / width
    wide = {name: _padded(name, t, width, old) for name, t in tensors.items()}
    shape = replace(shape, hidden_size=width, norm_eps=eps, out_size=None)
    if kept_K is None:
        return Widened(shape, wide, None, None)
    wide["model.embed_tokens.weight"][:, old] = constant
    wide["model.norm.weight"][old] = 1.0
    value = _cut_value(shape, tensors, old, constant, eps)
    head_VD = wide["lm_head.weight"].new_zeros(shape.vocab_size, width)
    head_VD[:, old] = -value
    head_VD[kept_K] = wide["lm_head.weight"]
    wide["lm_head.weight"] = head_VD
    return Widened(shape, wide, old, -value)


def _padded(name: str, tensor: Tensor, width: int, old: int) -> Tensor:
    """One tensor of the wide model: new columns where it reads the residual, rows where it
    writes."""
    part = name.split(".")[-2]
    if part in ("q_norm", "k_norm"):
        return tensor.clone()
    if part.endswith("norm"):
        scaled = (tensor.double() * math.sqrt(old / width)).to(tensor.dtype)
        return torch.cat([scaled, tensor.new_zeros(width - old)])
    if name.endswith(".bias"):
        grows = width - old if part in _WRITERS else 0
        return torch.cat([tensor, tensor.new_zeros(grows)])
    if part in _WRITERS:
        return torch.cat([tensor, tensor.new_zeros(width - old, tensor.shape[1])])
    assert part in (*_READERS, "embed_tokens", "lm_head"), name
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], width - old)], dim=1)


def _cut_value(
    wide: LlamaShape, tensors: Mapping[str, Tensor], old: int, constant: float, eps: float
) -> float:
    """M of the module's proof, for the narrow weights."""
    scaled_KD = tensors["lm_head.weight"].double() * tensors["model.norm.weight"].double()
    kept = math.sqrt(old) * float(scaled_KD.norm(dim=1).max())
    length = residual_bound(wide, tensors, old)
    norm_eps = (wide.hidden_size * eps + constant**2) / old
    largest = math.sqrt(length**2 + old * norm_eps)
    value = 2.0 * (kept + MARGIN) * largest / (constant * math.sqrt(wide.hidden_size))
    dtype = tensors["lm_head.weight"].dtype
    if not value < MAX_ROW or dtype == torch.float16:
        raise IncompatibleError(
            "the cut vocabulary rows cannot be made unreachable in these weights",
            found=f"{dtype} with a residual bound of {length:.1e}",
            expected="float32 or bfloat16 weights of ordinary size",
            do="export with --to specctl, or export the drafter before vocab-trim",
        )
    return float(torch.tensor(value).to(dtype))


def residual_bound(shape: LlamaShape, tensors: Mapping[str, Tensor], width: int) -> float:
    """An upper bound of |x| in front of the final norm, over all inputs of any length.

    |norm(x)| <= sqrt(D) max|w|. Attention mixes values convexly, so per head it is no longer than
    the longest value. |silu(a) * b| <= |a| |b|.
    """
    total = float(tensors["model.embed_tokens.weight"].double().norm(dim=1).max())
    group = shape.num_heads // shape.num_kv_heads
    for layer in range(shape.num_layers):
        own = f"model.layers.{layer}."

        def normed(name: str, own: str = own) -> float:
            return math.sqrt(width) * float(tensors[f"{own}{name}.weight"].double().abs().max())

        def bias(name: str, own: str = own) -> Tensor:
            found = tensors.get(f"{own}self_attn.{name}.bias")
            return torch.zeros(1) if found is None else found.double()

        into = normed("input_layernorm")
        heads = tensors[f"{own}self_attn.v_proj.weight"].chunk(shape.num_kv_heads)
        lengths = [spectral_bound(head_ED) * into for head_ED in heads]
        longest = math.hypot(*lengths) + float(bias("v_proj").norm())
        mixed = math.sqrt(group) * longest
        total += spectral_bound(tensors[f"{own}self_attn.o_proj.weight"]) * mixed
        total += float(bias("o_proj").norm())
        into = normed("post_attention_layernorm")
        parts = [tensors[f"{own}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
        gate, up, down = map(spectral_bound, parts)
        total += down * (gate * into) * (up * into)
    return total


def spectral_bound(weight: Tensor) -> float:
    """An upper bound of the largest singular value: min(Frobenius, sqrt(|W|_1 |W|_inf))."""
    magnitude = weight.double().abs()
    sums = float(magnitude.sum(0).max()) * float(magnitude.sum(1).max())
    return min(float(magnitude.norm()), math.sqrt(sums))
