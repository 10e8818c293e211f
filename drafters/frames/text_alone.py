"""A batch as a draft model of text reads it: without the placeholders of images.

What is drafted then depends on the text alone (a text-only draft for a multimodal target: arXiv
2404.08856, section 3), in training as in drafting (`ShortContextState`). A token behind an image is
predicted from the text before it.
Letters: B rows, D hidden width, R flat rows, S sequence, V target vocabulary, X any axes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.batch import HeadRows, TrainBatch


def text_alone(batch: TrainBatch) -> TrainBatch:
    """The batch without its placeholders, rows padded at the end; itself where it has none. The
    teacher's row of a token is that of the position before it, so that of what stands in front of
    an image is taken from the image's last position."""
    if batch.image_BS is None or not bool(batch.image_BS.any()):
        return batch
    assert batch.part is None, "rows with images are not divided among processes"
    is_text_BS = ~batch.image_BS & (batch.document_BS >= 0)
    width = int(is_text_BS.sum(1).max())
    kept_BS = is_text_BS.long().sort(dim=1, descending=True, stable=True).indices[:, :width]
    is_kept_BS = is_text_BS.gather(1, kept_BS)
    document_BS = batch.document_BS.gather(1, kept_BS).masked_fill(~is_kept_BS, -1)

    def taken(values_BSX: Tensor, at_BS: Tensor) -> Tensor:
        shape = (*at_BS.shape, *values_BSX.shape[2:])
        index = at_BS.view(*at_BS.shape, *[1] * (values_BSX.dim() - 2)).expand(shape)
        return values_BSX.gather(1, index)

    teacher_BS = _teacher_places(kept_BS, batch.document_BS)
    rows = batch.teacher_rows
    if rows is not None:
        first_B1 = (
            batch.ids_BS.shape[1] * torch.arange(len(kept_BS), device=kept_BS.device)[:, None]
        )
        rows = _rows(rows, (first_B1 + teacher_BS).flatten())
    return replace(
        batch,
        ids_BS=taken(batch.ids_BS, kept_BS),
        loss_mask_BS=taken(batch.loss_mask_BS, kept_BS) & is_kept_BS,
        document_BS=document_BS,
        position_BS=_positions(document_BS),
        taps={tap: taken(state_BSD, kept_BS) for tap, state_BSD in batch.taps.items()},
        teacher_BSV=None if batch.teacher_BSV is None else taken(batch.teacher_BSV, teacher_BS),
        teacher_rows=rows,
        images=(),
        image_BS=None,
    )


def _teacher_places(kept_BS: Tensor, document_BS: Tensor) -> Tensor:
    """[B, S]: where the target predicts the token that follows in the text: right before that."""
    following_BS = torch.cat([kept_BS[:, 1:], kept_BS[:, -1:] + 1], dim=1) - 1
    is_same_BS = following_BS >= kept_BS
    places_BS = torch.where(is_same_BS, following_BS, kept_BS)
    return places_BS.clamp(max=document_BS.shape[1] - 1)


def _rows(rows: HeadRows, at_R: Tensor) -> HeadRows:
    return replace(
        rows,
        state_RD=rows.state_RD[at_R],
        log_z_R=None if rows.log_z_R is None else rows.log_z_R[at_R],
        best_R=None if rows.best_R is None else rows.best_R[at_R],
    )


def _positions(document_BS: Tensor) -> Tensor:
    """[B, S]: the index inside each document."""
    at_BS = torch.arange(document_BS.shape[1], device=document_BS.device).expand_as(document_BS)
    is_first_BS = torch.ones_like(document_BS, dtype=torch.bool)
    is_first_BS[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    start_BS = torch.where(is_first_BS, at_BS, 0).cummax(dim=1).values
    return at_BS - start_BS
