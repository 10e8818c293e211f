"""Alignment: which row of a packed batch predicts which token, with every mask applied.

Row t holds the state after reading token t. Looking `steps` ahead, row t is to predict token t +
steps, and the teacher's row for that token is t + steps - 1. So an ordinary LM looks 1 ahead; EAGLE
row t, which has also read token t + 1, looks 2 ahead (its training-time-test step j: 2 + j); Medusa
head i looks 2 + i ahead.
Letters: A anchors, B rows, Q picked rows, R flat rows (B S), S sequence, V target vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import HeadRows, Select, TrainBatch
from specctl.core.forward.row_part import RowPart

REACH = 64  # a loss over a part of the rows looks at most so far ahead


@dataclass(frozen=True, slots=True)
class AlignedRows:
    """The flat rows that have something to predict, and what.

    row_Q          flat index b * S + t of the predicting state (of those computed here)
    label_Q        target id to be predicted
    teacher_row_Q  flat index of the teacher row that holds the target's distribution for it
    teacher_RV     raw target logits, at hand or computed by rows, or None
    weight_Q       how much each counts in a loss; None: all alike
    select         which of the rows a loss may sum, asked when it knows how far it is off
    part           the stretch of every row that these rows are of; None: all of it
    """

    row_Q: Tensor
    label_Q: Tensor
    teacher_row_Q: Tensor
    teacher_RV: Tensor | HeadRows | None
    weight_Q: Tensor | None = field(default=None, kw_only=True)
    select: Select | None = None
    part: RowPart | None = None

    def only(self, keep_Q: Tensor) -> AlignedRows:
        """The rows where `keep_Q` is True."""
        row_Q, label_Q, teacher_row_Q = (
            x[keep_Q] for x in (self.row_Q, self.label_Q, self.teacher_row_Q)
        )
        weight_Q = None if self.weight_Q is None else self.weight_Q[keep_Q]
        return replace(
            self, row_Q=row_Q, label_Q=label_Q, teacher_row_Q=teacher_row_Q, weight_Q=weight_Q
        )


def shifted(values_BS: Tensor, steps: int, fill: int = 0) -> Tensor:
    """[B, S]: entry t holds values[t + steps]; `fill` where the row has ended."""
    return F.pad(values_BS[:, steps:], (0, min(steps, values_BS.shape[1])), value=fill)


def ahead_mask(batch: TrainBatch, steps: int) -> Tensor:
    """Bool [B, S]: token t + steps is to be predicted and belongs to the document of row t."""
    same_BS = shifted(batch.document_BS, steps, fill=-1) == batch.document_BS
    wanted_BS = shifted(batch.loss_mask_BS.long(), steps) > 0
    return same_BS & (batch.document_BS >= 0) & wanted_BS


def document_lengths(batch: TrainBatch) -> Tensor:
    """[B, S]: how many tokens of its document the row holds, at every position."""
    changes_BS = torch.zeros_like(batch.document_BS)
    changes_BS[:, 1:] = (batch.document_BS[:, 1:] != batch.document_BS[:, :-1]).long()
    place_BS = changes_BS.cumsum(1)
    count_BS = torch.zeros_like(place_BS).scatter_add_(1, place_BS, torch.ones_like(place_BS))
    return count_BS.gather(1, place_BS)


def aim(batch: TrainBatch, steps: int) -> AlignedRows:
    """Everything that rows looking `steps` ahead are trained on."""
    row_Q = _own(batch, ahead_mask(batch, steps)).flatten().nonzero()[:, 0]
    label_Q = batch.ids_BS.flatten()[(row_Q + steps).clamp(max=batch.ids_BS.numel() - 1)]
    found = AlignedRows(row_Q, label_Q, row_Q + steps - 1, teacher_of(batch), batch.select)
    if batch.part is None:
        return found
    assert steps <= REACH, f"looks {steps} ahead"
    length = batch.ids_BS.shape[1]
    start, stop = batch.part.bounds(length)
    row_Q, place_Q = row_Q // length, row_Q % length
    return replace(found, row_Q=row_Q * (stop - start) + place_Q - start, part=batch.part)


def teacher_rows(batch: TrainBatch) -> Tensor:
    """[Q]: flat rows of the teacher that losses over the batch may ask for."""
    return _own(batch, ahead_mask(batch, 1), REACH).flatten().nonzero()[:, 0]


def _own(batch: TrainBatch, wanted_BS: Tensor, more: int = 0) -> Tensor:
    """False at positions that other processes compute, but for so many behind those of this one."""
    if batch.part is None:
        return wanted_BS
    start, stop = batch.part.bounds(wanted_BS.shape[1])
    at_S = torch.arange(wanted_BS.shape[1], device=wanted_BS.device)
    return wanted_BS & (at_S >= start) & (at_S < stop + more)


def teacher_of(batch: TrainBatch) -> Tensor | HeadRows | None:
    """Target logits by flat row."""
    if batch.teacher_BSV is not None:
        return batch.teacher_BSV.flatten(0, 1)
    return batch.teacher_rows


def random_anchors(batch: TrainBatch, most: int) -> Tensor:
    """[B, A]: at most so many of a row, in random order; those with something to predict first. Of
    a stretch its share of them, among the positions that are computed here."""
    wanted_BS = batch.own(ahead_mask(batch, 2)).float()
    chance_BS = wanted_BS + torch.rand(wanted_BS.shape, device=wanted_BS.device)
    most = most if batch.part is None else math.ceil(most / batch.part.count)
    return chance_BS.topk(min(most, wanted_BS.shape[1]), dim=1).indices + batch.start


def behind(rows: AlignedRows, batch: TrainBatch, anchor_BA: Tensor) -> AlignedRows:
    """Of the rows those that are anchors."""
    stands_BS = torch.zeros_like(batch.own(batch.ids_BS), dtype=torch.bool)
    stands_BS.scatter_(1, anchor_BA - batch.start, True)
    return rows.only(stands_BS.flatten()[rows.row_Q])
