"""Anchors: the positions of a packed batch behind which drafts begin while training.

Letters: B rows, S sequence, A anchors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.drafters.losses.align import AlignedRows, ahead_mask


def random_anchors(batch: TrainBatch, most: int) -> Tensor:
    """[B, A]: at most so many of a row, in random order; those with something to predict first."""
    wanted_BS = ahead_mask(batch, 2).float()
    chance_BS = wanted_BS + torch.rand(wanted_BS.shape, device=wanted_BS.device)
    return chance_BS.topk(min(most, wanted_BS.shape[1]), dim=1).indices


def behind(rows: AlignedRows, batch: TrainBatch, anchor_BA: Tensor) -> AlignedRows:
    """Of the rows those that are anchors."""
    stands_BS = torch.zeros_like(batch.ids_BS, dtype=torch.bool).scatter_(1, anchor_BA, True)
    return rows.only(stands_BS.flatten()[rows.row_N])
