"""Top-k, top-p and min-p of scores, in place, with one value per row, by PyTorch on any device.

Letters: B rows, C candidates, V target vocabulary, X any axes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def top_k_(scores_BXV: Tensor, k_B11: Tensor, largest: int) -> Tensor:
    """-inf below the k-th best score of each row; k = 0 is off. `largest` bounds k on the host."""
    largest = min(largest, scores_BXV.shape[-1])
    best_BXC = scores_BXV.topk(largest, dim=-1).values
    at_BX1 = (k_B11.clamp(1, largest) - 1).expand(-1, scores_BXV.shape[1], 1)
    edge_BX1 = best_BXC.gather(-1, at_BX1)
    return scores_BXV.masked_fill_((scores_BXV < edge_BX1) & (k_B11 > 0), -math.inf)


def top_p_(scores_BXV: Tensor, p_B11: Tensor) -> Tensor:
    """-inf outside the smallest set of best tokens with mass >= p; p = 1 is off."""
    ascending_BXV = _ascending(scores_BXV)
    below_BXV = ascending_BXV.softmax(-1).cumsum(-1) <= 1 - p_B11
    num_cut_BX1 = below_BXV.sum(-1, keepdim=True).clamp(max=scores_BXV.shape[-1] - 1)
    edge_BX1 = ascending_BXV.gather(-1, num_cut_BX1)
    return scores_BXV.masked_fill_((scores_BXV < edge_BX1) & (p_B11 < 1), -math.inf)


def min_p_(scores_BXV: Tensor, p_B11: Tensor) -> Tensor:
    """-inf where the probability is below p times the largest one; p = 0 is off."""
    prob_BXV = scores_BXV.softmax(-1)
    edge_BX1 = prob_BXV.amax(-1, keepdim=True) * p_B11
    return scores_BXV.masked_fill_(prob_BXV < edge_BX1, -math.inf)


def _ascending(scores_BXV: Tensor) -> Tensor:
    if scores_BXV.device.type == "cpu":  # numpy sorts floats five times faster than torch
        return torch.from_numpy(np.sort(scores_BXV.numpy(), axis=-1))
    return scores_BXV.sort(-1).values
