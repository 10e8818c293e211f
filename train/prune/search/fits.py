"""Least squares, and what each point would have been predicted as by all the others (PRESS).

R2 flatters a fit of few points by several columns; a point left out is its true test. Without
refitting: y - r / (1 - h), where r is the residual and h the point's leverage. Letters: N points,
C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import SpecctlError

_OWN = 1.0 - 1e-6  # a point of this leverage is needed to determine the fit at all


@dataclass(frozen=True, slots=True)
class Fit:
    """One coefficient per column. `left_out_N`: each value as the other points predict it, nan
    where they do not determine it. `r2` and `left_out_r2` (None where a value is nan) are the
    shares of variance that the fit, and the predictions of points left out, explain."""

    coefficient_C: Tensor
    r2: float
    left_out_N: Tensor
    left_out_r2: float | None

    def at(self, row: Sequence[float]) -> float:
        return float(torch.tensor(row, dtype=torch.float64) @ self.coefficient_C)


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> Fit:
    """The fit of `values` by the columns of `rows`, which are scaled to one size first."""
    x_NC, y_N = (torch.tensor(v, dtype=torch.float64) for v in (rows, values))
    if len(y_N) < x_NC.shape[1]:
        raise SpecctlError(
            "too few measurements for a fit",
            found=f"{len(y_N)} shapes",
            expected=f"at least {x_NC.shape[1]}, of different depths and widths",
            do="give more --depths or --widths",
        )
    scale_C = x_NC.norm(dim=0).clamp(min=1e-30)
    scaled_NC = x_NC / scale_C
    inverse_CN = torch.linalg.pinv(scaled_NC)
    solution_C = inverse_CN @ y_N
    rest_N = y_N - scaled_NC @ solution_C
    leverage_N = (scaled_NC * inverse_CN.T).sum(1)
    left_out_N = torch.where(leverage_N < _OWN, y_N - rest_N / (1.0 - leverage_N), torch.nan)
    explained = None if left_out_N.isnan().any() else _explained(left_out_N - y_N, y_N)
    return Fit(solution_C / scale_C, _explained(rest_N, y_N), left_out_N, explained)


def _explained(rest_N: Tensor, y_N: Tensor) -> float:
    """The share of variance that is not in the rest."""
    spread = float((y_N - y_N.mean()).square().sum())
    return 1.0 - float(rest_N.square().sum()) / spread if spread > 0 else 1.0
