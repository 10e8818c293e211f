"""The argmax of scores and Gumbel numbers, which draws a token by softmax(scores).

On a CPU a compiled function finds it from counters, without computing most of the numbers
(`models/native/draw.h`): in a fifth of the sum's time for 2,048 scores, an eighth for 128,256
(benchmarks/draw_cost.py). What it cannot tell from another token within rounding is left to the
sum, so that both always agree. On a GPU a kernel adds the numbers as it hashes them
(`models/triton/draw_kernel.py`).
Letters: B rows, M new nodes, V target vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.core.device.gpu_kernels import has_triton
from specctl.models.native.library import DrawCall, library


def best_token(scores: Tensor) -> Tensor:
    """argmax over the last dimension, the lowest id among equals."""
    if scores.device.type == "cpu":  # numpy's argmax is vectorised, 15 times faster than torch's
        plain = scores.float() if scores.dtype == torch.bfloat16 else scores  # numpy has no bf16
        return torch.from_numpy(plain.numpy().argmax(-1))
    return scores.argmax(-1)


class NoiseCounters(NamedTuple):
    """What the random numbers of B rows of M draws are hashed from: the seed and the counter of
    each row; to the counter are added `first` and `depth_BM`, or if it `is_chain` the number of the
    draw in its row; then, unless it is negative, `inner` and that number are hashed as well."""

    stream: int
    seeds: Sequence[int]
    counters: Sequence[int]
    first: int = 0
    depth_BM: Tensor | None = None
    is_chain: bool = False
    inner: int = -1


def drawn(scores_BMV: Tensor, code_V: Tensor, of: NoiseCounters) -> Tensor | None:
    """int64 [B, M]: the best of score + Gumbel number of every row, this one hashed from the
    counters and the int64 codes of tokens. None: undecided here."""
    if scores_BMV.is_cuda:
        return _drawn_on_gpu(scores_BMV, code_V, of)
    functions = library().functions if scores_BMV.device.type == "cpu" else None
    if functions is None or scores_BMV.dtype != torch.float32:
        return None
    B, M, V = scores_BMV.shape
    token_BM = torch.empty(B, M, dtype=torch.long)
    scores_BMV = scores_BMV.contiguous()
    depth_BM = None if of.depth_BM is None else of.depth_BM.contiguous()
    call = DrawCall(
        *(B, M, V, of.stream, of.is_chain, of.first, of.inner),
        (ctypes.c_int64 * B)(*of.seeds),
        (ctypes.c_int64 * B)(*of.counters),
        None if depth_BM is None else depth_BM.data_ptr(),
        code_V.data_ptr(),
        scores_BMV.data_ptr(),
        token_BM.data_ptr(),
    )
    return None if functions.draw(ctypes.byref(call)) else token_BM


def _drawn_on_gpu(scores_BMV: Tensor, code_V: Tensor, of: NoiseCounters) -> Tensor | None:
    if not has_triton():
        return None
    from specctl.models.triton import draw_kernel

    if not draw_kernel.takes(scores_BMV):
        return None
    seed_B, counter_B = draw_kernel.sent(of.seeds, of.counters, scores_BMV.device)
    more = of.first, of.depth_BM, of.is_chain, of.inner
    return draw_kernel.draw(scores_BMV, code_V, of.stream, seed_B, counter_B, *more)
