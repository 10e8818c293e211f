"""FlexAttention (torch.nn.attention.flex_attention, arXiv 2412.05496) for queries that see one run
of keys each: what a GPU takes for masks that its flash kernel for packed documents does not know.

The mask is two numbers a query (`first_BT`, `last_BT`); blocks of 128 x 128 in which nobody looks
are skipped, and in those where everybody looks at everything no mask is read. Blocks are told from
the two numbers, so that no mask of queries times keys is ever made. The backward pass computes the
set's own forward again, because it is given the output and log-sum-exp of all sets together
(`attention.py`) and the kernel wants those of its own.
Letters: B rows, E head width, H query heads, J key/value heads, L positions, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specctl.core.device.gpu_kernels import has_triton
from specctl.drafters.attention.joined import JoinedSoftmax

BLOCK = 128
KINDS = 64  # of calls, each compiled: by dtype, heads, with and without gradient
LEAST_WIDTH = 16  # of a head


def is_at_hand(query: Tensor) -> bool:
    """True where the kernel is generated: on CUDA with Triton, for its dtypes and widths."""
    fits = query.dtype != torch.float64 and query.shape[-1] >= LEAST_WIDTH
    return query.device.type == "cuda" and fits and has_triton()


@cache
def kernel() -> Callable[..., Any]:
    """flex_attention, compiled; lengths differ from batch to batch."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)

    def call(*tensors: Tensor, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=KINDS):
            return compiled(*tensors, **options)

    return call


def block_mask(first_BT: Tensor, last_BT: Tensor, num_keys: int) -> Any:
    """The mask by blocks; nothing is read back to the host."""
    from torch.nn.attention.flex_attention import BlockMask

    num_queries = first_BT.shape[1]
    low, most_low = _extremes(first_BT)
    least_high, high = _extremes(last_BT)
    start = torch.arange(0, num_keys, BLOCK, device=first_BT.device)
    stop = (start + BLOCK).clamp(max=num_keys)
    is_seen = (low[..., None] < stop) & (high[..., None] >= start)
    is_full = (most_low[..., None] <= start) & (least_high[..., None] >= stop - 1)
    is_full &= stop - start == BLOCK

    def seen(b: Tensor, h: Tensor, t: Tensor, at: Tensor) -> Tensor:
        del h
        return (at >= first_BT[b, t]) & (at <= last_BT[b, t])

    return BlockMask.from_kv_blocks(
        *_listed(is_seen & ~is_full),
        *_listed(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(num_queries, num_keys),
    )


def _extremes(value_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest of every block of queries, row by row; the last block is filled up with its
    own last query."""
    B, T = value_BT.shape
    more = -T % BLOCK
    filled = torch.cat([value_BT, value_BT[:, -1:].expand(B, more)], dim=1).view(B, -1, BLOCK)
    return filled.amin(-1), filled.amax(-1)


def _listed(is_in: Tensor) -> tuple[Tensor, Tensor]:
    """Of every block of queries: how many blocks of keys it reads, and which, those first; int32,
    with an axis for the heads."""
    order = is_in.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return (
        is_in.sum(-1, dtype=torch.int32)[:, None],
        order.to(torch.int32)[:, None].contiguous(),
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, first_BT: Tensor, last_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T]; zero and -inf where nothing is seen."""
    from torch.nn.attention.flex_attention import AuxRequest

    mask = block_mask(first_BT, last_BT, key.shape[2])
    out, aux = kernel()(
        query, key, value, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


def backward(
    joined: JoinedSoftmax, key: Tensor, value: Tensor, first_BT: Tensor, last_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and values of this set.

    With o, l of the set alone, its weight in the whole is w = exp(l - lse), and out = sum w o. So o
    has the gradient w grad, and l has w grad . (o - out).
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (joined.query, key, value)]
        own, own_lse = forward(leaves[0], leaves[1], leaves[2], first_BT, last_BT)
    with torch.no_grad():
        share = (own_lse - joined.lse).exp()[..., None]
        by_own = joined.grad * share
        wide = joined.lse.dtype
        by_lse = (by_own.to(wide) * (own.to(wide) - joined.out)).sum(-1)
        # A query that sees nothing here has no log-sum-exp to move.
        by_lse = by_lse.masked_fill(own_lse == -torch.inf, 0.0)
    wanted = (by_own.to(own.dtype), by_lse.to(own_lse.dtype))
    by_query, by_key, by_value = torch.autograd.grad((own, own_lse), leaves, wanted)
    return by_query, by_key, by_value
