"""Muon on matrices of which every process keeps some rows.

Orthogonalising needs the whole matrix, everything else is elementwise. So each process keeps the
momentum of its own rows, gathers the mixed gradient of one matrix at a time, orthogonalises it
whole, and moves its own rows. Every process computes the same product: one all-gather per matrix,
no second layout of parameters, and the very update that one process would make (handing out whole
matrices instead would save the repeated products, but no longer fit FSDP's layout by rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from specctl.train.distributed.pieces import piece_of, with_piece

MOMENTUM = 0.95


class ShardedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` with Nesterov momentum, for parameters that are DTensors; its state has
    the same name and meaning, so that a run may continue under the other one."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes the gradient itself"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["weight_decay"])

    def _move(self, parameter: DTensor, rate: float, decay: float) -> None:
        gradient = cast(DTensor, parameter.grad)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        own, buffer = gradient.to_local(), state["momentum_buffer"].to_local()
        buffer.lerp_(own, 1.0 - MOMENTUM)
        mixed = cast(DTensor, with_piece(own.lerp(buffer, MOMENTUM), parameter))
        step = piece_of(orthogonal_step(mixed.full_tensor(), rate), parameter)
        parameter.to_local().mul_(1.0 - rate * decay).add_(step.to_local())


def orthogonal_step(gradient: Tensor, rate: float) -> Tensor:
    """What Muon adds to a matrix for this gradient, momentum already mixed in. Asked of
    torch.optim.Muon itself, so that both ways take its arithmetic."""
    matrix = nn.Parameter(torch.zeros_like(gradient))
    matrix.grad = gradient
    muon = torch.optim.Muon(
        [matrix], lr=rate, weight_decay=0.0, momentum=0.0, nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    muon.step()  # type: ignore[no-untyped-call]
    return matrix.detach()
