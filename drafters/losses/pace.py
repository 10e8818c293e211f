"""D-PACE (arXiv 2605.18810): every place of a draft weighs what the draft's expected length gains
by it.

Where place i passes with chance c_i, a draft is sum_m prod_{i <= m} c_i tokens long on average.
The derivative by log c_j is w_j = sum_{m >= j} prod_{i <= m} c_i (eq. 8), of chances smoothed to
(1 - a) c + a (eq. 7); the loss at place j weighs w_j, without a gradient of it (eq. 9). In the
paper c is the draft's probability of the text's token and the loss its cross-entropy, as with
`loss: ce` here. With any other loss c is alpha, which is that chance itself: on the embedded target
KL so is ahead of cross-entropy (docs/benchmarks/trainers.md). Places that look behind a document's
end count for nothing, and a draft must be there at all the others.
Letters: D hidden width, P path, Q picked rows, R flat rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import LossOptions, TeacherLogits, accepted
from specctl.models.sliced_head import Head

Drafted = tuple[Tensor, Head, AlignedRows]  # [R, D] states that a head reads, and what they predict


def paced(
    places: Sequence[Drafted],
    vocab: VocabMap | None,
    options: LossOptions,
    teacher: TeacherLogits | None,
    smoothing: float,
) -> list[AlignedRows]:
    """The rows of each place with their weights; a row of all places is one draft."""
    if not places:
        return []
    first_RD = places[0][0]
    shape = len(places), len(first_RD)
    dtype = torch.promote_types(first_RD.dtype, torch.float32)
    chance_PR = torch.ones(shape, dtype=dtype, device=first_RD.device)
    wanted_PR = torch.zeros_like(chance_PR)
    for i, (state_RD, head, rows) in enumerate(places):
        chance_Q = accepted(state_RD, head, rows, vocab, options, teacher)
        chance_PR[i, rows.row_Q] = ((1 - smoothing) * chance_Q + smoothing).to(chance_PR)
        wanted_PR[i, rows.row_Q] = 1.0
    weight_PR = paces(chance_PR, wanted_PR)
    return [
        replace(rows, weight_Q=weight_PR[i, rows.row_Q]) for i, (_, _, rows) in enumerate(places)
    ]


def paces(chance_PR: Tensor, wanted_PR: Tensor) -> Tensor:
    """[H, R]: eq. 8 of chances that are smoothed; 1 in `wanted_PR` where there is a token to
    predict."""
    reached_PR = chance_PR.cumprod(0) * wanted_PR
    return reached_PR.flip(0).cumsum(0).flip(0)
