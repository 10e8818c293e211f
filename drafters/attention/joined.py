"""JoinedSoftmax: what the backward pass of every set of keys begins with.

Letters: B rows, E head width, H query heads, T fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class JoinedSoftmax:
    """Output and log-sum-exp of all sets together, with the gradient that comes in: query, grad,
    out [B, H, T, E]; lse, and delta = sum over E of grad out, [B, H, T]."""

    query: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor

    @staticmethod
    def of(query: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> JoinedSoftmax:
        return JoinedSoftmax(query, grad, out, lse, (grad.to(lse.dtype) * out).sum(-1))
