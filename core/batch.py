"""TrainBatch and LossOut: what a drafter trains on and what its loss returns.

Letters: B rows, C candidates, D hidden width, K draft vocabulary, Q picked rows, R flat rows, S
sequence, V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.forward.prompt_images import TextImages
from specctl.core.forward.row_part import RowPart

# KL(p || q) of the rows that a loss is about to sum -> bool: the rows it shall sum (AdaSPEC).
Select = Callable[[Tensor], Tensor]

MOST_GATHERED = 2**24  # numbers of LM-head rows that are copied together


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Target logits [R, V] that are computed when rows of them are read: the target's last
    states and its head. At a large vocabulary they are a hundred times smaller than the logits.
    `log_z_R`, `best_R`: log-normalisers at temperature 1 and most probable ids, where features on
    disk hold them; of rows that no loss may read they are zeros."""

    state_RD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None = None
    log_z_R: Tensor | None = None
    best_R: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.state_RD.shape[0], self.weight_VD.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.state_RD.device

    def __len__(self) -> int:
        return self.state_RD.shape[0]

    def __getitem__(self, row_Q: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):  # the target keeps its precision
            return F.linear(self.state_RD[row_Q], self.weight_VD, self.bias_V)

    def at(self, row_Q: Tensor, ids_QC: Tensor) -> Tensor:
        """[Q, C]: the logits of a few ids in each of these rows, some rows at a time."""
        size = max(1, MOST_GATHERED // (ids_QC.shape[1] * self.weight_VD.shape[1]))
        parts = zip(torch.split(row_Q, size), torch.split(ids_QC, size), strict=True)
        with torch.autocast(self.device.type, enabled=False):
            few_QC = torch.cat(
                [
                    (self.weight_VD[some_QC] @ self.state_RD[some_Q][..., None])[..., 0]
                    for some_Q, some_QC in parts
                ]
            )
        return few_QC if self.bias_V is None else few_QC + self.bias_V[ids_QC]

    def over(self, ids_K: Tensor) -> HeadRows:
        """Logits [R, K] of these ids alone, for the K / V of the work."""
        bias_K = None if self.bias_V is None else self.bias_V[ids_K]
        return HeadRows(self.state_RD, self.weight_VD[ids_K], bias_K)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One packed batch, all tensors on one device.

    ids_BS        token ids                     loss_mask_BS  True: this token is to be predicted
    document_BS   document number, -1 padding   position_BS   position inside the document
    taps          hidden_states index -> [B, S, D] features of the frozen target
    teacher_BSV   target logits (raw, before any temperature) or None
    teacher_rows  the same as rows b * S + t, computed when read; for `Needs.teacher_rows`
    select        which rows the losses over this batch may sum; None: all of them
    progress      share of the training steps that lie behind, for what changes on the way
    part          the stretch of every row that is to be computed here; None: all of it
    images        the images of its texts, where they are kept
    image_BS      True: a placeholder of an image, whose tap 0 is what a vision tower made; None:
                  no images, or the target has not read them yet
    position_BS3  the position inside the document by axis (M-RoPE: time, height, width), which the
                  images of a text make another than `position_BS`; None: in no text
    """

    ids_BS: Tensor
    loss_mask_BS: Tensor
    document_BS: Tensor
    position_BS: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    teacher_BSV: Tensor | None = None
    teacher_rows: HeadRows | None = None
    select: Select | None = None
    progress: float = 0.0
    part: RowPart | None = None
    images: tuple[TextImages, ...] = ()
    image_BS: Tensor | None = None
    position_BS3: Tensor | None = None

    def own(self, values_BSX: Tensor) -> Tensor:
        """The positions that are to be computed here."""
        return values_BSX if self.part is None else self.part.of(values_BSX)

    def own_taps(self) -> dict[int, Tensor]:
        """The features there."""
        return {tap: self.own(state_BSD) for tap, state_BSD in self.taps.items()}

    @property
    def start(self) -> int:
        """The first of them."""
        return 0 if self.part is None else self.part.bounds(self.ids_BS.shape[1])[0]


@dataclass(frozen=True, slots=True)
class LossOut:
    """A loss as a sum with its count; the loop divides once over all ranks and micro-batches.

    `metrics` maps a name to (sum, count), reduced in the same way, never part of the gradient.
    `part`: the stretch of every row that it was summed over; None: all of it.
    """

    sum: Tensor
    count: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    part: RowPart | None = None
