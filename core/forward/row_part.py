"""RowPart: a stretch of every row of a batch, where several processes compute one row together.

Each process of a group has the tokens of whole rows and computes the positions of its own stretch.
What another position may look at, keys and values, is gathered over the group; the gradient of what
was gathered is summed over the group and cut back. Everything else of a drafter is done position by
position, and sums over positions are sums over processes.
Letters: B rows, S sequence, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class RowPart:
    """Stretch `index` of `count`, which differ by one position at most; `group` are the processes
    that have the others."""

    index: int
    count: int
    group: Any = None

    def bounds(self, length: int) -> tuple[int, int]:
        """First position of this stretch, and the one behind its last."""
        return self.index * length // self.count, (self.index + 1) * length // self.count

    def of(self, values_BSX: Tensor) -> Tensor:
        """Its positions of what is known of whole rows."""
        start, stop = self.bounds(values_BSX.shape[1])
        return values_BSX[:, start:stop]

    def total(self, sums: Tensor) -> Tensor:
        """Sums over whole rows: those of every process of the group, added up. No gradient."""
        found = sums.detach().clone()
        dist.all_reduce(found, group=self.group)
        return found

    def gathered(self, own: Tensor, length: int, dim: int) -> Tensor:
        """Whole rows of that length: what every process of the group has of its own stretch, one
        behind the other along `dim`. All of them must call this, and so in the backward pass."""
        found: Tensor = _Gathered.apply(own, self, length, dim)  # type: ignore[no-untyped-call]
        return found


class _Gathered(torch.autograd.Function):
    """Stretches are filled up to the longest for the exchange."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: RowPart, length: int, dim: int) -> Tensor:
        ctx.part, ctx.length, ctx.dim = part, length, dim
        bounds = [RowPart(i, part.count).bounds(length) for i in range(part.count)]
        longest = max(stop - start for start, stop in bounds)
        behind = [0, 0] * (own.dim() - 1 - dim) + [0, longest - own.shape[dim]]
        filled = F.pad(own, behind).contiguous()
        parts = [torch.empty_like(filled) for _ in range(part.count)]
        dist.all_gather(parts, filled, group=part.group)
        cut = [x.narrow(dim, 0, b[1] - b[0]) for x, b in zip(parts, bounds, strict=True)]
        return torch.cat(cut, dim)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grad, part = outer[0], ctx.part
        total = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        total = total.clone() if total is grad else total
        dist.all_reduce(total, group=part.group)
        start, stop = part.bounds(ctx.length)
        return total.narrow(ctx.dim, start, stop - start).to(grad.dtype), None, None, None
