"""A figure summed over rows of a head whose logits are never all alive.

Logits over a large vocabulary dwarf everything else in training. Here a slice of rows goes through
the head, its loss is taken and, where the head is one matrix, differentiated at once: what stays is
the gradient of states and matrix, as in fused linear cross-entropy (arXiv 2410.10989). Nothing is
computed twice, and the order of the sums is fixed. Any other head is recomputed in the backward
pass. Where tensors have only shapes, of slices of one size the first and the last are computed, and
the others only leave behind what those leave: what is alive at most is the same.
Letters: D hidden width, F figures, K draft vocabulary, Q picked rows, R flat rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specctl.core.forward.only_shapes import has_only_shapes

Head = Callable[[Tensor], Tensor]
Rows = tuple[Tensor, ...]  # row numbers first, then whatever else `Part` wants, all of one length
Part = Callable[..., Tensor]  # (draft_QK, *rows) -> [F]: the loss first, then figures


@dataclass(frozen=True, slots=True)
class LinearHead:
    """A head that is one matrix, which lets its gradient be taken slice by slice."""

    weight_KD: Tensor
    bias_K: Tensor | None = None

    def __call__(self, state_QD: Tensor) -> Tensor:
        dtype = torch.promote_types(state_QD.dtype, self.weight_KD.dtype)
        bias_K = None if self.bias_K is None else self.bias_K.to(dtype)
        return F.linear(state_QD.to(dtype), self.weight_KD.to(dtype), bias_K)


def sum_slices(state_RD: Tensor, head: Head, slices: Sequence[Rows], part: Part) -> Tensor:
    """[F]: the sum of `part` over the slices. Only its first entry carries a gradient."""
    if torch.is_grad_enabled():
        if isinstance(head, nn.Linear):
            head = LinearHead(head.weight, head.bias)
        if isinstance(head, LinearHead) and slices:
            total: Tensor = _Differentiated.apply(  # type: ignore[no-untyped-call]
                state_RD, head.weight_KD, head.bias_K, slices, part
            )
            return total
    again = len(slices) > 1 and torch.is_grad_enabled()

    def whole(*rows: Tensor) -> Tensor:
        return part(head(state_RD[rows[0]]), *rows)

    sums = [checkpoint(whole, *rows, use_reentrant=False) if again else whole(*rows)
            for rows in slices]  # fmt: skip
    return torch.stack(sums).sum(0)


@torch.no_grad()
def over_slices(state_RD: Tensor, head: Head, slices: Sequence[Rows], part: Part) -> Tensor:
    """[F, Q]: what `part` finds row by row, [F, Q of the slice], of all rows."""
    found, left_out = list[Tensor](), _left_out(slices)
    for i, rows in enumerate(slices):
        if i in left_out:
            found.append(found[0].new_empty(len(found[0]), len(rows[0])))
        else:
            found.append(part(head(state_RD[rows[0]]), *rows))
    return torch.cat(found, dim=1)


class _Differentiated(torch.autograd.Function):
    """The sum and, while a slice's logits are alive, the gradient of its first entry."""

    @staticmethod
    def forward(
        ctx: Any,
        state_RD: Tensor,
        weight_KD: Tensor,
        bias_K: Tensor | None,
        slices: Sequence[Rows],
        part: Part,
    ) -> Tensor:
        device = state_RD.device.type
        if torch.is_autocast_enabled(device) and state_RD.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)  # cast once, not for every slice
        else:
            dtype = torch.promote_types(state_RD.dtype, weight_KD.dtype)
        read_KD = weight_KD.to(dtype)
        inputs = (state_RD, weight_KD, bias_K)
        wanted = [x if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[:3],
                                                             strict=True)]  # fmt: skip
        grads = [None if x is None else torch.zeros_like(x) for x in wanted]
        sums = list[Tensor]()
        left_out = _left_out(slices)
        for i, rows in enumerate(slices):
            if i in left_out:
                sums.append(torch.empty_like(sums[0]))
                continue
            state_QD = state_RD[rows[0]].to(dtype)
            bias = None if bias_K is None else bias_K.to(dtype)
            logits_QK = F.linear(state_QD, read_KD, bias).requires_grad_()
            with torch.enable_grad():
                figures_F = part(logits_QK, *rows)
                (grad_QK,) = torch.autograd.grad(figures_F[0], logits_QK)
            sums.append(figures_F.detach())
            del logits_QK, figures_F
            _add(grads, grad_QK, rows[0], state_QD, read_KD)
        ctx.save_for_backward(*grads)
        return torch.stack(sums).sum(0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        weight, grads = outer[0][0], ctx.saved_tensors
        if weight.device.type != "cpu" or float(weight) != 1.0:
            grads = [None if g is None else g.mul_(weight.to(g.dtype)) for g in grads]
        return (*grads, None, None)


def _left_out(slices: Sequence[Rows]) -> frozenset[int]:
    """The slices that are like one before and one after them, where only shapes count."""
    if not has_only_shapes():
        return frozenset()
    sizes = [len(rows[0]) for rows in slices]
    first = {size: i for i, size in reversed([*enumerate(sizes)])}
    last = {size: i for i, size in enumerate(sizes)}
    return frozenset(range(len(sizes))) - {*first.values(), *last.values()}


def _add(
    grads: list[Tensor | None], grad_QK: Tensor, row_Q: Tensor, state_QD: Tensor, weight_KD: Tensor
) -> None:
    """Gradients of one slice's states, matrix and bias; a row is in one slice only. Products are of
    the dtype that the logits were computed in; over the slices they are added up in the matrix's
    own."""
    into_state, into_weight, into_bias = grads
    with torch.autocast(grad_QK.device.type, enabled=False):
        if into_bias is not None:
            into_bias += grad_QK.sum(0).to(into_bias.dtype)
        grad_QK = grad_QK.to(weight_KD.dtype)
        if into_state is not None:
            into_state[row_Q] = (grad_QK @ weight_KD).to(into_state.dtype)
        if into_weight is None:
            return
        if into_weight.dtype == grad_QK.dtype:
            into_weight.addmm_(grad_QK.t(), state_QD)
        elif grad_QK.is_cuda and into_weight.dtype == torch.float32:  # nothing is rounded between
            into_weight += torch.mm(grad_QK.t(), state_QD, out_dtype=torch.float32)
        else:
            into_weight += grad_QK.t() @ state_QD
