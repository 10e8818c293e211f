"""Inverse CDF sampling: a token as a function of a distribution and one uniform number.

Drafter, target and verification must cut [0, 1) alike to agree on a token, so all of them call this
function: the vocabulary in the order of its ids, sums in float64.
Letters: V target vocabulary, X any axes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_cdf(prob_XV: Tensor, uniform_X: Tensor) -> Tensor:
    """[X]: the first id whose cumulative probability exceeds the uniform number, both [0, 1).
    `prob_XV` need not sum to one; an id of probability zero is never chosen."""
    cdf_XV = prob_XV.double().cumsum(-1)
    at_X1 = uniform_X.double()[..., None] * cdf_XV[..., -1:]
    found_X = torch.searchsorted(cdf_XV, at_X1, right=True)[..., 0]
    return found_X.clamp(max=prob_XV.shape[-1] - 1)
