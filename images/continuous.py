"""Continuous speculative decoding (arXiv 2411.11925): drafts that are vectors, not tokens.

A draft x drawn from a density q stands with probability min(1, p(x) / q(x)); where it does not, x
is drawn anew from the residual

    r(x) = max(0, p(x) - q(x)) / (1 - alpha),    alpha = integral of min(p, q)

whose normaliser need not be known: a draw of p stands with probability max(0, 1 - q(x) / p(x)),
else p is drawn from again (rejection sampling with p itself as the bound, as p - q <= p). So the
result follows p exactly. A draft is rejected with probability 1 - alpha, and then takes 1 / (1 -
alpha) draws of p on average: one draw of p for each result whatever q is. What drafting saves is
passes of the target, which reads many drafts at once, not draws of its head.

A diffusion head's density of x itself has no formula, but that of its whole path of denoising has:
p(x_T) p(x_{T-1} | x_T) ... p(x_0 | x_1), all of them Gaussian. `DenoisingPath` is such a density,
over paths [steps + 1, X]: the target scores the very path that was drafted. Accepting paths is
lossless for paths, and so for their ends. The paper's alignment of denoising trajectories, by which
more is accepted, is not built.
Letters: B rows, Q picked rows, R flat rows, X any axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MOST_DRAWS = 10_000  # of the residual: where it holds no more than rounding, p is drawn from


class Density(Protocol):
    """What is drawn from: B points at once, and the log-density of points."""

    def draw(self, count: int, random: torch.Generator) -> Tensor: ...

    def log_density(self, points: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GaussianMixture:
    """A mixture of Gaussians with one width in all directions: weights [R], means [R, X] and
    standard deviations [R]; points are [B, X]."""

    weight_R: Tensor
    mean_RX: Tensor
    width_R: Tensor

    def draw(self, count: int, random: torch.Generator) -> Tensor:
        """[B, X]"""
        of_B = torch.multinomial(self.weight_R, count, replacement=True, generator=random)
        noise_BX = torch.randn(
            count, self.mean_RX.shape[1], generator=random, dtype=self.mean_RX.dtype
        )
        return self.mean_RX[of_B] + self.width_R[of_B, None] * noise_BX

    def log_density(self, points: Tensor) -> Tensor:
        """[B], in nats."""
        gap_BR = ((points[:, None] - self.mean_RX) ** 2).sum(-1)
        size = self.mean_RX.shape[1]
        log_BR = -gap_BR / (2 * self.width_R**2) - size * (
            self.width_R.log() + 0.5 * math.log(2 * math.pi)
        )
        weight_R = self.weight_R / self.weight_R.sum()
        return (log_BR + weight_R.log()).logsumexp(-1)


@dataclass(frozen=True, slots=True)
class DenoisingPath:
    """The paths of a diffusion head: it begins at a standard normal x_T, and step t draws x_{t-1}
    from a Gaussian with mean `mean(x_t, t)` and standard deviation `widths[t - 1]`. A point is a
    path [steps + 1, X], x_T first."""

    mean: Callable[[Tensor, int], Tensor]
    widths: Sequence[float]
    size: int

    def draw(self, count: int, random: torch.Generator) -> Tensor:
        """[B, steps + 1, X]"""
        state = torch.randn(count, self.size, generator=random, dtype=torch.float64)
        path = [state]
        for step in range(len(self.widths), 0, -1):
            noise = torch.randn(count, self.size, generator=random, dtype=torch.float64)
            state = self.mean(state, step) + self.widths[step - 1] * noise
            path.append(state)
        return torch.stack(path, 1)

    def log_density(self, points: Tensor) -> Tensor:
        """[B], of whole paths, in nats."""
        log_B = _normal(points[:, 0], 1.0)
        for index, step in enumerate(range(len(self.widths), 0, -1)):
            gap = points[:, index + 1] - self.mean(points[:, index], step)
            log_B = log_B + _normal(gap, self.widths[step - 1])
        return log_B


def _normal(gap_BX: Tensor, width: float) -> Tensor:
    """[B]: the log-density of a Gaussian of that width around zero."""
    size = gap_BX.shape[1]
    return -(gap_BX**2).sum(-1) / (2 * width**2) - size * math.log(width * math.sqrt(2 * math.pi))


@dataclass(frozen=True, slots=True)
class ContinuousDraws:
    """`points` follow the target; `accepted` [B] says which were drafted; `draws` of the target's
    density that rejected drafts took, over all points."""

    points: Tensor
    accepted: Tensor
    draws: int


def accept_or_redraw(
    target: Density, draft: Density, points: Tensor, random: torch.Generator
) -> ContinuousDraws:
    """Points drawn from `draft`, [B, ...], each kept or drawn anew, so that all follow `target`."""
    log_ratio_B = target.log_density(points) - draft.log_density(points)
    uniform_B = torch.rand(len(points), generator=random, dtype=torch.float64)
    accepted_B = uniform_B.log() < log_ratio_B
    made, draws = points.clone(), 0
    left_Q = (~accepted_B).nonzero()[:, 0]
    for _ in range(MOST_DRAWS):
        if not len(left_Q):
            return ContinuousDraws(made, accepted_B, draws)
        new = target.draw(len(left_Q), random)
        draws += len(left_Q)
        log_ratio_Q = draft.log_density(new) - target.log_density(new)
        uniform_Q = torch.rand(len(left_Q), generator=random, dtype=torch.float64)
        stands_Q = uniform_Q >= log_ratio_Q.exp()
        made[left_Q[stands_Q]] = new[stands_Q]
        left_Q = left_Q[~stands_Q]
    made[left_Q] = target.draw(len(left_Q), random)
    return ContinuousDraws(made, accepted_B, draws + len(left_Q))


def integrated_acceptance(
    target: Density, draft: Density, least: float, most: float, cells: int
) -> float:
    """alpha, the integral of min(p, q) over [least, most] by the midpoint rule; of densities over
    one axis, which have next to nothing outside."""
    edge = (most - least) / cells
    middle_B1 = (least + edge * (torch.arange(cells, dtype=torch.float64) + 0.5))[:, None]
    low_B = torch.minimum(target.log_density(middle_B1), draft.log_density(middle_B1))
    return float(low_B.exp().sum() * edge)
