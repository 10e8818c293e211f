# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The argmax of scores and Gumbel numbers on CUDA: two kernels for what PyTorch starts 45 for.

The numbers are those of `runtime/sampling/noise.py`, hashed from counters where they are added; the
logarithms may differ from PyTorch's in the last bit. A program finds the best of BLOCK tokens as
one integer (score above, token below), the second kernel the best of these.
Letters: B rows, M new nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.core.device.gpu_kernels import has_triton, on_device

BLOCK = 1024  # tokens of one program
STEP: tl.constexpr = tl.constexpr(-7046029254386353131)
MUL_1: tl.constexpr = tl.constexpr(-4658895280553007687)
MUL_2: tl.constexpr = tl.constexpr(-7723592293110705685)
LOW_32: tl.constexpr = tl.constexpr((1 << 32) - 1)
LOW_35: tl.constexpr = tl.constexpr((1 << 35) - 1)
LOW_40: tl.constexpr = tl.constexpr((1 << 40) - 1)
LOWEST: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 32) & LOW_32)) * MUL_1
    x = (x ^ ((x >> 29) & LOW_35)) * MUL_2
    return x ^ ((x >> 32) & LOW_32)


@triton.jit(do_not_specialize=["M", "V", "stream", "first", "inner", "score_b", "score_m"])
def _best(
    scores, code, seeds, counters, depth, part, M, V, stream, first, inner, score_b, score_m,
    HAS_DEPTH: tl.constexpr, IS_CHAIN: tl.constexpr, HAS_INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of a block of one draw: its ordered score << 32 | (last id - id)."""
    draw, split = tl.program_id(0), tl.program_id(1)
    b, m = (draw // M).to(tl.int64), (draw % M).to(tl.int64)
    seed = _mix(tl.load(seeds + b) * STEP + STEP)
    counter = tl.load(counters + b) + first
    if HAS_DEPTH:
        counter += tl.load(depth + draw)
    if IS_CHAIN:
        counter += m
    key = _mix((seed ^ stream) + counter * STEP)
    if HAS_INNER:
        key = _mix(key + (inner + m) * STEP)
    at = split * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    x = (key ^ tl.load(code + at, mask=inside, other=0)) * MUL_1
    x = (x ^ ((x >> 32) & LOW_32)) * MUL_2
    u = (((x >> 24) & LOW_40).to(tl.float32) + 0.5) * (1.0 / (1 << 40))
    u = tl.minimum(u, 1.0 - 1.0 / (1 << 24))
    rest = 1.0 - u  # -log(1 - u), and where 1 - u has lost the digits of u, what they add
    power = tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))
    score = tl.load(scores + b * score_b + m * score_m + at, mask=inside, other=0.0)
    score = score - tl.log(power)
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score != score, 0x7FFFFFFF, ordered)  # no number is the best, as in PyTorch
    found = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
    best = tl.max(tl.where(inside, found, LOWEST), 0)
    tl.store(part + draw * tl.num_programs(1) + split, best)


@triton.jit(do_not_specialize=["num_splits"])
def _token(part, token, num_splits, SPLITS: tl.constexpr):
    """The token of the best block of one draw."""
    draw, split = tl.program_id(0), tl.arange(0, SPLITS)
    found = tl.load(part + draw * num_splits + split, mask=split < num_splits, other=LOWEST)
    tl.store(token + draw, 0x7FFFFFFF - (tl.max(found, 0) & LOW_32))


def takes(scores_BMV: Tensor) -> bool:
    """Whether `draw` reads these scores."""
    return (
        scores_BMV.is_cuda
        and has_triton()
        and scores_BMV.dtype == torch.float32
        and scores_BMV.stride(-1) == 1
        and 0 < scores_BMV.numel() < 1 << 31
        and not torch.compiler.is_compiling()
    )


def draw(
    scores_BMV: Tensor,
    code_V: Tensor,
    stream: int,
    seed_B: Tensor,
    counter_B: Tensor,
    first: int = 0,
    depth_BM: Tensor | None = None,
    is_chain: bool = False,
    inner: int = -1,
) -> Tensor:
    """int64 [B, M]: the best of score + Gumbel number of every row. All tensors but the float32
    scores are int64; what is hashed: `gumbel_max.NoiseCounters`."""
    B, M, V = scores_BMV.shape
    assert len(code_V) == V, f"{len(code_V)} codes for {V} tokens"
    num_splits = triton.cdiv(V, BLOCK)
    part = scores_BMV.new_empty(B * M * num_splits, dtype=torch.long)
    token_BM = scores_BMV.new_empty(B, M, dtype=torch.long)
    depth_BM = None if depth_BM is None else depth_BM.contiguous()
    with on_device(scores_BMV):
        _best[(B * M, num_splits)](
            scores_BMV, code_V, seed_B, counter_B, code_V if depth_BM is None else depth_BM, part,
            M, V, stream, first, inner, scores_BMV.stride(0), scores_BMV.stride(1),
            HAS_DEPTH=depth_BM is not None, IS_CHAIN=is_chain, HAS_INNER=inner >= 0, BLOCK=BLOCK,
        )  # fmt: skip
        size = triton.next_power_of_2(num_splits)
        _token[(B * M,)](part, token_BM, num_splits, SPLITS=size)
    return token_BM


def sent(seeds: Sequence[int], counters: Sequence[int], device: torch.device) -> Tensor:
    """int64 [2, B] on its way to the device, for which the host does not wait."""
    return torch.tensor([list(seeds), list(counters)]).to(device, non_blocking=True)
