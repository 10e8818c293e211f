"""The kernels a decoder spends its time in, chosen for few tokens at a time.

`linear`: on CPU, PyTorch's `F.linear` is poor between 2 and about 64 rows; oneDNN with a weight
laid out for it once is not. Measured on one core of an AVX512 machine, torch 2.13, microseconds for
1 / 4 / 8 / 16 rows of x, `F.linear` against `PackedWeight`:

    [1280, 256]  float32   144 / 212 / 245 / 284     85 /  88 / 112 / 152
    [6144, 256]  float32   740 / 1146 / 1290 / 1591  413 / 354 / 482 / 684
    [5632, 1024] float32  1215 / 2900 / 3251 / 4283  1273 / 1357 / 1764 / 2243
    [5632, 1024] bfloat16  984 / 943 / 1345 / 1638   274 / 335 / 547 / 934
    [512, 256]   float32    16 / 29 / 60 / 96        24 / 28 / 36 / 55

so a packed weight is used from two rows on, and at one row when it is bfloat16 or not small. A
packed weight is a copy. Where there is none, two or three float32 rows go through `mm(W, x^T)`,
which costs there what one row costs.

`attend`: a group of query heads becomes extra query positions, so that keys and values are never
repeated.
Letters: B rows, E head width, H query heads, J key/value heads, L positions, T fed tokens.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.device.gpu_kernels import has_triton
from specctl.models.weights.copies import Copies
from specctl.models.weights.int4 import Int4Weight, linear_int4

SMALL_WEIGHT = 200_000  # elements; below it a single float32 row is faster unpacked
PIECE = 192  # queries of a forward that attend together
PACK_ROWS = 16  # row count oneDNN lays the weight out for; serves 1 to 256 rows equally well


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in oneDNN's own layout; `plain` is kept where single rows use it."""

    packed: Tensor
    plain: Tensor | None


Weight = Tensor | PackedWeight | Int4Weight

# Private to torch, but what its own compiler has emitted for CPU since 2.0.
_OPS = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
_has_packed = torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
    hasattr(torch.ops.mkldnn, name) for name in _OPS
)
_packed_linear: Any = torch.ops.mkldnn._linear_pointwise if _has_packed else None


def can_pack(weight: Tensor) -> bool:
    """True where oneDNN takes this device and dtype."""
    if weight.device.type != "cpu" or not _has_packed:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> PackedWeight:
    """A copy of `weight` [out, in] in oneDNN's layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACK_ROWS)
    is_small = weight.dtype == torch.float32 and weight.numel() <= SMALL_WEIGHT
    return PackedWeight(packed, weight.detach() if is_small else None)


def prepared(weight: Tensor) -> Weight:
    """The weight as serving reads it: packed where that is possible, else as it is. Whoever asks
    for the same weight gets the same copy."""
    return _packed.of(weight) if can_pack(weight) else weight.detach()


_packed: Copies[Tensor, PackedWeight] = Copies(pack)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias by the fastest kernel for the number of rows of x."""
    if isinstance(weight, Int4Weight):
        return linear_int4(x, weight, bias)
    if isinstance(weight, PackedWeight):
        if weight.plain is not None and x.numel() == x.shape[-1]:
            return F.linear(x, weight.plain, bias)
        return packed_linear(x, weight.packed, bias)
    if x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled():
        rows = x.numel() // x.shape[-1]
        if 2 <= rows <= 3:
            swapped = torch.mm(weight, x.reshape(rows, -1).t()).t()
            swapped = swapped if bias is None else swapped + bias
            return swapped.reshape(*x.shape[:-1], weight.shape[0])
    return F.linear(x, weight, bias)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias by oneDNN; `weight` in its layout or as it is. Only where `can_pack`."""
    out: Tensor = _packed_linear(x, weight, bias, "none", [], "")
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 or better. Five kernels in
    `F.rms_norm` on CPU, four here: 7.5 instead of 11 microseconds for one row of 256."""
    width = x.shape[-1]
    if weight is not None and (own := small_kernels(x)) is not None:
        found: Tensor = own.rms_norm(x, weight, eps)
        return found
    is_fused = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if is_fused or x.device.type != "cpu" or x.dtype == torch.float16:
        return F.rms_norm(x, (width,), weight, eps)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    length = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=wide)
    scale = torch.addcmul(kept_scalar(eps, wide), length, length, value=1.0 / width).rsqrt_()
    out = scale * x if weight is None else (scale * x).mul_(weight)
    return out.to(x.dtype)


@lru_cache
def kept_scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor, made once."""
    return torch.tensor(value, dtype=dtype)


def additive_mask(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, group * T, L]: a bool mask as scores to add (0 or -inf), repeated for folded heads.
    One conversion a forward is cheaper than one a layer inside the attention kernel. On a GPU the
    mask as it is, where no gradient is needed: our kernel reads it so."""
    if mask.device.type == "cuda" and not torch.is_grad_enabled():
        return mask
    hidden = torch.zeros((), dtype=dtype, device=mask.device)
    scores = torch.where(mask, hidden, hidden - torch.inf)
    return scores.repeat(1, 1, group, 1) if group > 1 and mask.shape[2] > 1 else scores


class MaskPiece(NamedTuple):
    """Some queries, the keys from the first to the last that one of them sees, and what is added to
    their scores: an `additive_mask`."""

    queries: slice
    keys: slice
    scores: Tensor


def mask_of_forward(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor | list[MaskPiece]:
    """A bool mask as `attend` reads it in every layer of a forward: an `additive_mask`, on a CPU in
    pieces where there are many queries. PyTorch's attention computes the scores of every key, also
    of those that nobody sees, half of them in long rows: 1,000 tokens take 7.7 instead of 10.9 ms
    a layer (one core, AVX512)."""
    num_queries = mask.shape[2]
    is_there = type(mask) is Tensor and mask.device.type == "cpu"
    if not is_there or num_queries <= PIECE or torch.compiler.is_compiling():
        return additive_mask(mask, group, dtype)
    pieces, size = [], -(-num_queries // -(-num_queries // PIECE))
    for first in range(0, num_queries, size):
        queries = slice(first, min(first + size, num_queries))
        part = mask[:, :, queries]
        seen = part.flatten(0, 2).any(0).nonzero()
        keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
        pieces.append(MaskPiece(queries, keys, additive_mask(part[..., keys], group, dtype)))
    return pieces


def attend(
    query_BHTE: Tensor,
    key_BJLE: Tensor,
    value_BJLE: Tensor,
    mask: Tensor | list[MaskPiece] | None,
    scale: float | None = None,
) -> Tensor:
    """[B, H, T, E]: softmax attention; `mask`, bool or additive, is [B, 1, T, L] (None = everything
    is seen), or folded [B, 1, group * T, L] (or T = 1, broadcast), or that in pieces."""
    if isinstance(mask, list):
        parts = [
            attend(query_BHTE[:, :, at], key_BJLE[:, :, to], value_BJLE[:, :, to], scores, scale)
            for at, to, scores in mask
        ]
        by_token = [part.transpose(1, 2) for part in parts]  # as whoever joins the heads reads it
        return torch.cat(by_token, dim=1).transpose(1, 2)
    B, H, T, E = query_BHTE.shape
    heads = key_BJLE.shape[1]
    if query_BHTE.device.type == "cuda" and not _is_planned_once(query_BHTE, key_BJLE):
        split = split_kernel()
        if split is not None and split.takes(query_BHTE, key_BJLE, value_BJLE, mask):
            out: Tensor = split.attend(query_BHTE, key_BJLE, value_BJLE, mask, scale)
            return out
    if heads != H:
        query_BHTE = query_BHTE.reshape(B, heads, H // heads * T, E)
        if mask is not None and mask.shape[2] == T > 1:
            mask = mask.repeat(1, 1, H // heads, 1)
    out = F.scaled_dot_product_attention(
        query_BHTE, key_BJLE, value_BJLE, attn_mask=mask, scale=scale
    )
    return out if heads == H else out.reshape(B, H, T, -1)  # kernels of CUDA lay it out otherwise


def _is_planned_once(query_BHTE: Tensor, key_BJLE: Tensor) -> bool:
    """Whether these are whole rows of training, all of one length. PyTorch's attention plans for
    every length anew (cuDNN: 178 ms on an H200), and is faster then."""
    T = query_BHTE.shape[2]
    return key_BJLE.shape[2] == T and T % 256 == 0


@cache
def layer_kernels() -> Any:
    """The module of what stands between products on CUDA; None without Triton."""
    return importlib.import_module("specctl.models.triton.layer_kernels") if has_triton() else None


def small_kernels(x: Tensor) -> Any:
    """That module, where it reads these tokens."""
    own = layer_kernels() if x.device.type == "cuda" else None
    return own if own is not None and own.takes(x) else None


@cache
def split_kernel() -> Any:
    """The module of our attention on CUDA; None without Triton."""
    return (
        importlib.import_module("specctl.models.triton.split_attention") if has_triton() else None
    )
