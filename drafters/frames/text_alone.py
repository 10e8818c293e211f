"""A batch without some of its positions: as a draft model of text reads it, images left out.

What is drafted then depends on the text alone (a text-only draft for a multimodal target: arXiv
2404.08856, section 3), in training as in drafting (`ShortContextState`). A token behind an image is
predicted from the text before it.
Letters: B rows, D hidden width, R flat rows, S sequence, V target vocabulary, X any axes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch


def text_alone(batch: TrainBatch) -> TrainBatch:
    """The batch without its placeholders, rows padded at the end; itself where it has none. The
    teacher's row of a token is that of the position before it, so that of what stands in front of
    an image is taken from the image's last position."""
    if batch.image_BS is None or not bool(batch.image_BS.any()):
        return batch
    is_text_BS = ~batch.image_BS & (batch.document_BS >= 0)
    at_BS = kept_places(is_text_BS)
    following_BS = torch.cat([at_BS[:, 1:], at_BS[:, -1:] + 1], dim=1) - 1
    teacher_BS = torch.where(following_BS >= at_BS, following_BS, at_BS)
    teacher_BS = teacher_BS.clamp(max=is_text_BS.shape[1] - 1)
    return replace(without(batch, is_text_BS, teacher_BS), image_BS=None)


def kept_places(keep_BS: Tensor) -> Tensor:
    """The positions that stay, in order, and behind them others up to the longest row."""
    order_BS = keep_BS.long().sort(dim=1, descending=True, stable=True).indices
    return order_BS[:, : int(keep_BS.sum(1).max())]


def begins(document_BS: Tensor) -> Tensor:
    """Bool [B, S]: another document begins."""
    begins_BS = torch.ones_like(document_BS, dtype=torch.bool)
    begins_BS[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    return begins_BS


def without(batch: TrainBatch, keep_BS: Tensor, teacher_BS: Tensor | None = None) -> TrainBatch:
    """The batch without the positions where `keep_BS` is False: those behind move up, in their
    document as well. `teacher_BS`: where the teacher's row of each kept position is read (None:
    at itself)."""
    assert batch.part is None, "positions of a stretch cannot move"
    gone_BS = (~keep_BS).long()
    before_BS = gone_BS.cumsum(1) - gone_BS
    at_S = torch.arange(keep_BS.shape[1], device=keep_BS.device)
    first_BS = torch.where(begins(batch.document_BS), at_S, 0).cummax(1).values
    position_BS = batch.position_BS - before_BS + before_BS.gather(1, first_BS)
    at_BS = kept_places(keep_BS)
    kept_BS = keep_BS.gather(1, at_BS)
    teacher_BS = at_BS if teacher_BS is None else teacher_BS

    def taken(values_BSX: Tensor, at_BS: Tensor) -> Tensor:
        index = at_BS[(...,) + (None,) * (values_BSX.dim() - 2)]
        return values_BSX.gather(1, index.expand(*at_BS.shape, *values_BSX.shape[2:]))

    rows = batch.teacher_rows
    if rows is not None:
        row_B1 = torch.arange(len(at_BS), device=at_BS.device)[:, None]
        flat_R = (teacher_BS + row_B1 * len(at_S)).flatten()
        log_z_R, best_R = (None if x is None else x[flat_R] for x in (rows.log_z_R, rows.best_R))
        rows = replace(rows, state_RD=rows.state_RD[flat_R], log_z_R=log_z_R, best_R=best_R)
    teacher, image_BS = batch.teacher_BSV, batch.image_BS
    return replace(
        batch,
        ids_BS=taken(batch.ids_BS, at_BS),
        loss_mask_BS=taken(batch.loss_mask_BS, at_BS) & kept_BS,
        document_BS=taken(batch.document_BS, at_BS).masked_fill(~kept_BS, -1),
        position_BS=taken(position_BS, at_BS),
        taps={tap: taken(state_BSD, at_BS) for tap, state_BSD in batch.taps.items()},
        teacher_BSV=None if teacher is None else taken(teacher, teacher_BS),
        teacher_rows=rows,
        images=(),
        position_BS3=None,
        image_BS=None if image_BS is None else taken(image_BS, at_BS) & kept_BS,
    )
