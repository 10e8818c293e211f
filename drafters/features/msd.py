"""MSD (arXiv 2505.14260): EAGLE's layer for targets that read images, text and visual tokens apart.

Row t of text is fc(cat(e_{t+1}, f_t)), as EAGLE's. Where token t + 1 stands for an image the row is
the target's own visual embedding there, untouched (`VisualDrafter`). The loss is EAGLE's (SmoothL1
1.0, cross-entropy 0.1) and leaves rows of images out. Training has two stages: text alone in the
first half; in the second the share of multimodal samples rises from 0 to 1 (`multimodal_share`).
In the paper samples are drawn by that share. Here a batch is what the data gives: where it holds
documents of both kinds, the loss counts each with the chance that its kind would have been drawn
with, and one kind alone is counted whole (our own choice).
Letters: B rows, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Needs
from specctl.drafters.frames.feature_drafter import AxesOptions
from specctl.drafters.frames.visual_drafter import VISUAL, VisualDrafter


@dataclass(frozen=True, slots=True)
class MsdOptions(AxesOptions):
    """`decoupled` False mixes rows of images like those of text, which is EAGLE (an ablation);
    `staged` False counts documents of both kinds alike from the beginning on (another)."""

    noise: float = 0.1
    decoupled: bool = True
    staged: bool = True


def multimodal_share(progress: float) -> float:
    """The share of samples with images when so much of the training is done."""
    return max(0.0, 2 * progress - 1)


def documents_drawn(batch: TrainBatch, share: float) -> Tensor:
    """Bool [B, S]: True throughout documents that are counted, those with images with the chance
    `share`, those of text alone with 1 - `share`; everywhere if the batch holds only one kind, or
    if nothing was drawn."""
    document_BS, image_BS = batch.document_BS, batch.image_BS
    everything_BS = torch.ones_like(document_BS, dtype=torch.bool)
    if image_BS is None:
        return everything_BS
    begins_BS = torch.zeros_like(document_BS)
    begins_BS[:, 1:] = (document_BS[:, 1:] != document_BS[:, :-1]).long()
    place_BS = begins_BS.cumsum(1)
    count_BS = torch.zeros_like(place_BS).scatter_add_(1, place_BS, image_BS.long())
    has_image_BS = count_BS.gather(1, place_BS) > 0
    chance_BS = torch.rand(place_BS.shape, device=place_BS.device).gather(1, place_BS)
    drawn_BS = chance_BS < torch.where(has_image_BS, share, 1 - share)
    wanted_BS = batch.loss_mask_BS & (document_BS >= 0)
    kinds = has_image_BS[wanted_BS]
    if not bool(kinds.any()) or bool(kinds.all()) or not bool((drawn_BS & wanted_BS).any()):
        return everything_BS
    return drawn_BS


class Msd(VisualDrafter):
    """Which documents are counted; the frame does the rest."""

    family = "msd"
    options: MsdOptions

    @property
    def decouples(self) -> bool:
        return self.options.decoupled

    def needs(self) -> Needs:
        needs = super().needs()
        return replace(needs, taps=(VISUAL, self.tap)) if self.decouples else needs

    def loss(self, batch: TrainBatch) -> LossOut:
        if self.options.staged and batch.image_BS is not None and torch.is_grad_enabled():
            drawn_BS = documents_drawn(batch, multimodal_share(batch.progress))
            batch = replace(batch, loss_mask_BS=batch.loss_mask_BS & drawn_BS)
        return super().loss(batch)


FAMILY = Family(
    name="msd",
    summary=(
        "EAGLE's decoder layer for targets that read images: the row of a visual token is what the "
        "target's own vision tower put there, rows of text are EAGLE's, and training begins with "
        "text before images come in. On a target without images it is EAGLE."
    ),
    paper="https://arxiv.org/abs/2505.14260",
    options=MsdOptions,
    build=Msd,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree"),
)
