"""What a drafter learns from: one forward of the frozen target over a packed batch.

Only the taps and logits that the drafter declares in `needs()` are kept. B rows, S sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Drafter, Needs
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.language_model import Feed, LanguageModel
from specctl.models.kernels import linear
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.not_finite import is_bad, not_numbers
from specctl.runtime.target.target import Target
from specctl.train.data.images.shown_images import ImageReader, placeholders
from specctl.train.features.image_feed import Seen, images_of, positions_of, with_seen

FEW = 1 / 4  # of the target's ids: a draft vocabulary for which only its own columns are made


def training_needs(drafter: Drafter, is_stretch: bool = False) -> Needs:
    """What a drafter needs while it learns. The target's logits of a whole batch do not exist at
    once for one that drafts few of the ids, nor where a process computes a stretch of the rows."""
    needs, size = drafter.needs(), drafter.spec.vocab_size
    is_few = drafter.vocab is not None and drafter.vocab.size <= FEW * size
    by_rows = needs.teacher and (needs.teacher_rows or is_few or is_stretch)
    return replace(needs, teacher_rows=by_rows, teacher_log_z=by_rows and is_few)


def capture(
    target: Target, batch: TrainBatch, needs: Needs, reader: ImageReader | None = None
) -> TrainBatch:
    """What `read` gives, of a frozen target; NumbersError where its states or logits are no
    numbers. `reader`: of the batch's images; None: one is made where there are some.

    Runs under `no_grad`, not `inference_mode`: the taps enter the drafter's autograd graph, which
    refuses inference tensors.
    """
    with torch.no_grad():
        if batch.images and reader is None:
            reader = ImageReader(target)
        found = read(target, batch, needs, reader=reader)
        at = first_not_finite(found)
    if at is not None:
        row, place = at
        own_S = found.document_BS[row] == found.document_BS[row, place]
        own_S[place + 1 :] = False
        raise not_numbers(target.lm, target.name, found.ids_BS[row, own_S].tolist())
    return found


def first_not_finite(batch: TrainBatch) -> tuple[int, int] | None:
    """Row and place of the first real token at which taps or teacher are no numbers."""
    padding_BS = batch.document_BS < 0
    states = list(batch.taps.values())
    if batch.teacher_rows is not None:
        states.append(batch.teacher_rows.state_RD.view(*padding_BS.shape, -1))
    is_fine_BS = torch.ones_like(padding_BS)
    for state_BSD in states:
        is_fine_BS &= (state_BSD.amax(-1) - state_BSD.amin(-1)) < torch.inf
    if batch.teacher_BSV is not None:
        is_fine_BS &= ~is_bad(batch.teacher_BSV)
    bad_BS = ~(padding_BS | is_fine_BS)
    if not bool(bad_BS.any()):
        return None
    row, place = bad_BS.nonzero()[0].tolist()
    return row, place


def read(
    target: Target,
    batch: TrainBatch,
    needs: Needs,
    parts: SubLayers | None = None,
    residual_BSD: Tensor | None = None,
    reader: ImageReader | None = None,
) -> TrainBatch:
    """The batch on the target's device, with its taps and teacher logits in the target's dtype, and
    with a gradient where the target learns. Documents do not see each other, as in `TrainBatch`.
    `parts` are the layers that run (None: all), behind the embeddings or behind `residual_BSD`.
    `reader`: of the images in its texts, which a frozen target of all layers reads alone."""
    batch, seen = to_device(batch, target.device), Seen()
    if batch.images:
        assert reader is not None, "batches with images come with their reader"
        assert parts is None, "a target with images is read as a whole"
        seen = images_of(reader, batch)
        batch = replace(
            batch,
            image_BS=placeholders(batch, reader.vision.unsaid),
            position_BS3=positions_of(batch.position_BS, seen),
        )
    if not needs.taps and not needs.teacher:
        return batch
    last = target.spec.num_layers
    by_rows = needs.teacher and needs.teacher_rows and has_plain_head(target.lm)
    masks = target.lm.document_masks(batch.document_BS)
    wanted = tuple(sorted({*needs.taps, last} if by_rows else needs.taps))
    shows = needs.teacher and not by_rows
    if batch.images and reader is not None:
        feed = Feed(batch.ids_BS, batch.position_BS, masks, wanted, shows)
        out = target.lm.run(with_seen(reader, batch, seen, feed, target.dtype), None)
    else:
        out = target.lm.dense(
            batch.ids_BS,
            batch.position_BS,
            masks,
            wanted,
            logits=shows,
            parts=parts,
            residual_BSD=residual_BSD,
        )
    rows = None
    if by_rows:
        head = target.borrowed()
        rows = HeadRows(out.taps[last].flatten(0, 1), head.head_VD, head.head_bias_V)
    taps = {tap: out.taps[tap] for tap in needs.taps}
    return replace(batch, taps=taps, teacher_BSV=out.logits_BTV, teacher_rows=rows)


def has_plain_head(lm: LanguageModel) -> bool:
    """True where logits are the last state times the head, with nothing after it."""
    return isinstance(lm, FastLlama) or bool(getattr(lm, "has_plain_head", False))


@torch.no_grad()
def head_logits(lm: LanguageModel, state_BSD: Tensor) -> Tensor:
    """[B, S, V]: the logits of last states, by the very product that `capture` makes."""
    if isinstance(lm, FastLlama):
        return linear(state_BSD, lm.module.head)
    assert has_plain_head(lm), "the head of another model may not be a plain product"
    head = lm.borrowed()
    return F.linear(state_BSD, head.head_VD, head.head_bias_V)


def to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """The batch with its token tensors on `device`."""
    return replace(
        batch,
        ids_BS=batch.ids_BS.to(device),
        loss_mask_BS=batch.loss_mask_BS.to(device),
        document_BS=batch.document_BS.to(device),
        position_BS=batch.position_BS.to(device),
        image_BS=None if batch.image_BS is None else batch.image_BS.to(device),
        position_BS3=None if batch.position_BS3 is None else batch.position_BS3.to(device),
    )
