# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of few queries over a long cache on CUDA, as in a round of decoding.

PyTorch's kernels do not fit: the one of cuDNN plans anew for every length of the cache (178 ms each
on an H200), flash takes no mask of a tree and reads keys and values once for every query head, and
none but it shares one cache among many processors. Here the query heads of a key/value head are
folded into the rows of one product, the cache is split among programs, and their parts are joined
by log-sum-exp (Flash-Decoding, https://pytorch.org/blog/flash-decoding). The mask is read as it is:
a chain, a tree, a window.
Letters: B rows, E head width, H query heads, J key/value heads, L positions, T fed tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.core.device.gpu_kernels import on_device

KEYS = 64  # positions that a program reads at once
MOST_ROWS = 64  # folded queries of one program
MOST_SPLITS = 64  # of a cache
MOST_HEADS = 65_536  # rows times heads: programs side by side
WIDE = 512  # bytes of a head beyond which a program reads half as many positions
WAVES = 2  # programs wanted for each processor of the GPU
LOG2_E = 1.4426950408889634
LENGTHS = ["T", "L", "chunk", "mask_b", "mask_t"]  # no code of its own for each of them


@triton.jit(do_not_specialize=LENGTHS)
def _partly(
    query, key, value, mask, out, top, total, scale,
    T, L, chunk, J, group, num_splits,
    query_b, query_h, query_t, key_b, key_j, key_l, value_b, value_j, value_l, mask_b, mask_t,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of folded queries over one chunk of the cache: output [ROWS, E], the largest score
    and the sum of powers [ROWS]."""
    block, bj, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, j = (bj // J).to(tl.int64), (bj % J).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < group * T
    t, h = (row % T).to(tl.int64), j * group + row // T
    e = tl.arange(0, E)
    at_query = query + b * query_b + h[:, None] * query_h + t[:, None] * query_t + e[None, :]
    q = tl.load(at_query, mask=is_row[:, None], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, E], tl.float32)
    low = split * chunk
    high = tl.minimum(low + chunk, L)
    keys, values = key + b * key_b + j * key_j, value + b * value_b + j * value_j
    for start in range(low, high, KEYS):
        at = start + tl.arange(0, KEYS)
        is_key = at < high
        k = tl.load(keys + at[None, :] * key_l + e[:, None], mask=is_key[None, :], other=0.0)
        is_seen = is_row[:, None] & is_key[None, :]
        if IS_MASKED:
            at_mask = mask + b * mask_b + t[:, None] * mask_t + at[None, :]
            is_seen = is_seen & (tl.load(at_mask, mask=is_seen, other=0) != 0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        score = tl.where(is_seen, score, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        finite = tl.where(better == float("-inf"), 0.0, better)
        power = tl.exp2(score - finite[:, None])
        less = tl.exp2(best - finite)
        weight = weight * less + tl.sum(power, 1)
        v = tl.load(values + at[:, None] * value_l + e[None, :], mask=is_key[:, None], other=0.0)
        part = tl.dot(power.to(v.dtype), v, input_precision=PRECISION)
        found = found * less[:, None] + part
        best = better
    place = ((bj * num_splits + split) * tl.num_programs(0) + block) * ROWS + tl.arange(0, ROWS)
    place = place.to(tl.int64)
    tl.store(out + place[:, None] * E + e[None, :], found)
    tl.store(top + place, best)
    tl.store(total + place, weight)


@triton.jit(do_not_specialize=["T"])
def _joined(
    part, top, total, out, T, J, group, num_splits, num_rows,
    E: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One folded query: the parts of all chunks by their weights; zero where nothing is seen."""
    row, bj = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    place = ((bj * num_splits + split) * num_rows + row).to(tl.int64)
    best = tl.load(top + place, mask=is_split, other=float("-inf"))
    most = tl.max(best, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp2(best - most)
    weight = tl.sum(share * tl.load(total + place, mask=is_split, other=0.0), 0)
    e = tl.arange(0, E)
    parts = tl.load(part + place[:, None] * E + e[None, :], mask=is_split[:, None], other=0.0)
    found = tl.sum(parts * share[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    t, h = row % T, (bj % J) * group + row // T
    b = (bj // J).to(tl.int64)
    at = ((b * J * group + h) * T + t) * E + e
    tl.store(out + at, found.to(out.dtype.element_ty))


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` reads these: no gradient, heads whose width is a power of two."""
    width = query.shape[-1]
    return (
        query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and key.dtype == value.dtype == query.dtype
        and value.shape[-1] == key.shape[-1] == width
        and width in (16, 32, 64, 128, 256)
        and key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
        and (mask is None or _reads(mask, query, key))
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
        and 0 < len(query) * key.shape[1] < MOST_HEADS
        and key.shape[2] > 0
        and not torch.compiler.is_compiling()
    )


def _reads(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    is_bool = mask.dtype == torch.bool and mask.stride(-1) == 1
    B, _, T, _ = query.shape
    fits = mask.shape[0] in (1, B) and mask.shape[2] in (1, T) and mask.shape[3] == key.shape[2]
    return is_bool and mask.shape[1] == 1 and fits


def attend(
    query_BHTE: Tensor,
    key_BJLE: Tensor,
    value_BJLE: Tensor,
    mask_B1TL: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """[B, H, T, E]: softmax attention under a bool mask (None = everything is seen), where `takes`
    says so; zero for a query that sees nothing."""
    B, H, T, E = query_BHTE.shape
    J, L = key_BJLE.shape[1], key_BJLE.shape[2]
    group = H // J
    num_folded = group * T
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(num_folded)))
    num_blocks = triton.cdiv(num_folded, rows)
    keys = KEYS // 2 if E * query_BHTE.element_size() >= WIDE else KEYS
    wanted = triton.cdiv(WAVES * processors(query_BHTE.device), B * J * num_blocks)
    chunk = keys * triton.cdiv(triton.cdiv(L, keys), min(wanted, MOST_SPLITS))
    num_splits = triton.cdiv(L, chunk)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": query_BHTE.device}
    num_rows = num_blocks * rows
    part = torch.empty(B * J, num_splits, num_rows, E, **wide)
    top, total = torch.empty(2, B * J, num_splits, num_rows, **wide)
    out = torch.empty(B, H, T, E, dtype=query_BHTE.dtype, device=query_BHTE.device)
    mask, mask_b, mask_t = query_BHTE, 0, 0
    if mask_B1TL is not None:
        mask = mask_B1TL.view(torch.uint8)
        mask_b = 0 if mask.shape[0] == 1 else mask.stride(0)
        mask_t = 0 if mask.shape[2] == 1 else mask.stride(2)
    scale = E**-0.5 if scale is None else scale
    with on_device(query_BHTE):
        _partly[(num_blocks, B * J, num_splits)](
            query_BHTE, key_BJLE, value_BJLE, mask, part, top, total, scale * LOG2_E,
            T, L, chunk, J, group, num_splits,
            *query_BHTE.stride()[:3], *key_BJLE.stride()[:3], *value_BJLE.stride()[:3],
            mask_b, mask_t,
            E=E, ROWS=rows, KEYS=keys, IS_MASKED=mask_B1TL is not None,
            PRECISION="ieee" if query_BHTE.dtype == torch.float32 else "tf32",
            num_warps=4, num_stages=2 if E > 128 or query_BHTE.dtype == torch.float32 else 3,
        )  # fmt: skip
        _joined[(num_folded, B * J)](
            part, top, total, out, T, J, group, num_splits, num_rows,
            E=E, SPLITS=triton.next_power_of_2(num_splits), num_warps=4,
        )  # fmt: skip
    return out


@cache
def processors(device: torch.device) -> int:
    """Of the GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
