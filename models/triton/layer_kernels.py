# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What stands between the products of a decoder layer, on CUDA: one kernel each.

For one row of a layer the products take 120 microseconds on an H200 and PyTorch's fifteen small
kernels between them another 30, most of it to begin and end them; of 2,048 rows these take a
twentieth of the whole. All is computed in float32 and rounded once.
Letters: B rows, E head width, H query heads, J key/value heads, L positions, T fed tokens, X any
axes, Z slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.core.device.gpu_kernels import on_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_TOKENS = 2048  # beyond, nobody has measured it


@triton.jit
def _rms_norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    found = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _rotate_and_store(
    heads, cos, sin, query, keys, values, slot, at,
    T, rope_b, rope_t, key_z, key_j, key_l, value_z, value_j, value_l,
    H: tl.constexpr, J: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One head of one token: queries rotated, keys rotated into the cache, values into it."""
    token, head = tl.program_id(0), tl.program_id(1)
    b, t = token // T, token % T
    e = tl.arange(0, E)
    x = tl.load(heads + (token * (H + 2 * J) + head) * E + e)
    if head < H + J:
        swapped = tl.load(heads + (token * (H + 2 * J) + head) * E + (e + E // 2) % E)
        place = b * rope_b + t * rope_t + e
        by_cos, by_sin = tl.load(cos + place).to(tl.float32), tl.load(sin + place).to(tl.float32)
        rotated = x.to(tl.float32) * by_cos + swapped.to(tl.float32) * by_sin
        x = rotated.to(heads.dtype.element_ty)
    if head < H:
        tl.store(query + (token * H + head) * E + e, x)
    else:
        z, position = tl.load(slot + b), tl.load(at + token)
        if head < H + J:
            tl.store(keys + z * key_z + (head - H) * key_j + position * key_l + e, x)
        else:
            tl.store(values + z * value_z + (head - H - J) * value_j + position * value_l + e, x)


def takes(x: Tensor) -> bool:
    """Whether these few tokens [..., D] are read so: no gradient."""
    return (
        x.device.type == "cuda"
        and x.dtype in DTYPES
        and x.numel() <= MOST_TOKENS * x.shape[-1]
        and x.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = 8 if block >= 2048 else 4
    grid = (x.numel() // width,)
    with on_device(x):
        _rms_norm[grid](x, weight, out, eps, WIDTH=width, BLOCK=block, num_warps=warps)
    return out


def silu_mul(both: Tensor) -> Tensor:
    """Half as wide: silu of the first half of the last axis times the second."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    grid = (out.numel() // width, triton.cdiv(width, 1024))
    with on_device(both):
        _silu_mul[grid](both, out, WIDTH=width, BLOCK=1024, num_warps=4)
    return out


def rotate_and_store(
    heads_BTXE: Tensor,
    rope: tuple[Tensor, Tensor],
    store: tuple[Tensor, Tensor],
    slot_B1: Tensor,
    at_BT: Tensor,
) -> Tensor:
    """Queries [B, H, T, E], rotated; keys, rotated, and values are written to their places in the
    `store` (keys and values [Z, J, L, E]). `rope`: cos and signed sin, each [B, T, 1, E]."""
    B, T, num_heads, E = heads_BTXE.shape
    keys, values = store
    J = keys.shape[1]
    H = num_heads - 2 * J
    cos, sin = rope
    slot_B1, at_BT = slot_B1.contiguous(), at_BT.contiguous()
    query_BTHE = heads_BTXE.new_empty(B, T, H, E)
    rope_b = 0 if cos.shape[0] == 1 else cos.stride(0)
    with on_device(heads_BTXE):
        _rotate_and_store[(B * T, num_heads)](
            heads_BTXE, cos, sin, query_BTHE, keys, values, slot_B1, at_BT,
            T, rope_b, cos.stride(1), *keys.stride()[:3], *values.stride()[:3],
            H=H, J=J, E=E, num_warps=1,
        )  # fmt: skip
    return query_BTHE.transpose(1, 2)
