"""Muon: momentum whose matrices are made orthogonal before they are subtracted.

https://kellerjordan.github.io/posts/muon/. With G_t the gradient of a matrix [M, N]:

    B_t = m B_(t-1) + (1 - m) G_t,  O_t = NS5((1 - m) G_t + m B_t)
    W_t = (1 - r d) W_(t-1) - r s O_t

where m is the momentum (.95 there, less for runs of few steps), r the learning rate, d the weight
decay and s = .2 sqrt(max(M, N)), which gives a step the size of an AdamW step (arXiv 2502.16982,
equation 4).

Of a matrix that is spread over processes, each keeps the momentum of its own rows, gathers the
mixed gradient, orthogonalises it whole, and moves its own rows: one all-gather per matrix, no
second layout of parameters, and the very update that one process would make (handing out whole
matrices instead would save the repeated products, but no longer fit FSDP's layout by rows).

`torch.optim.Muon` iterates in bfloat16 everywhere. That is what tensor cores are for; on a CPU
without instructions for it, it is three times as slow as float32, and twelve updates make 5e-5 of
1e-7. The state has the same names and meaning: a run of either goes on with the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from specctl.train.distributed.pieces import like_parameter, local, whole, with_piece

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5: steep at 0, and not quite flat at 1
ITERATIONS = 5
WIDE = 3, 2  # iterations at once of a matrix twice as wide as high, on a CPU


class Muon(torch.optim.Optimizer):
    """For matrices, whole ones or DTensors."""

    def __init__(
        self,
        parameters: ParamsT,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = MOMENTUM,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes the gradient itself"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["weight_decay"], group["momentum"])

    def _move(self, parameter: nn.Parameter, rate: float, decay: float, momentum: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        own, buffer = local(gradient), local(state["momentum_buffer"])
        buffer.lerp_(own, 1.0 - momentum)
        mixed = whole(with_piece(own.lerp(buffer, momentum), parameter))
        step = like_parameter(orthogonal(mixed).to(mixed.dtype), parameter)
        size = 0.2 * math.sqrt(max(parameter.shape))
        local(parameter).mul_(1.0 - rate * decay).add_(local(step), alpha=-rate * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of the matrix U S V^T: its singular values end between .7 and 1.2. Newton-Schulz,
    five times x <- a x + b (x x^T) x + c (x x^T)^2 x, in bfloat16 on an accelerator."""
    is_cpu = matrix.device.type == "cpu"
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32) if is_cpu else torch.bfloat16)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    is_wide = x.shape[1] >= 2 * x.shape[0]
    for count in WIDE if is_cpu and is_wide else (1,) * ITERATIONS:
        x = _iterated(x, count)
    return x.T if is_tall else x


def _iterated(x: Tensor, count: int) -> Tensor:
    """So many iterations. Several at once: with g = x x^T and p = a + b g + c g^2, x becomes p x,
    and g becomes p g p; so the small g is iterated, and the wide x moved once, by the product of
    all p. All five of them so would lose small singular values: g holds their squares."""
    a, b, c = COEFFICIENTS
    square = x @ x.T
    factor = torch.addmm(square, square, square, beta=b, alpha=c)
    if count == 1:
        return torch.addmm(x, factor, x, beta=a)
    factor.diagonal().add_(a)
    product = factor
    for _ in range(count - 1):
        square = factor @ square @ factor
        factor = torch.addmm(square, square, square, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor @ product
    return product @ x
