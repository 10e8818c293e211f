"""Losses of feature drafters beside those against the target's distribution: the target's likeliest
tokens, and agreement between the steps of an unrolled drafter.
Letters: C candidates, D hidden width, K draft vocabulary, Q picked rows, R flat rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specctl.core.batch import LossOut
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.teacher import TeacherLogits, wide
from specctl.models.sliced_head import Head

ROWS_AT_ONCE = 256
NEGATIVES = 512


def topk_loss(
    ready_RD: Tensor,
    head: Head,
    aim: AlignedRows,
    vocab: VocabMap | None,
    teacher: TeacherLogits,
    top: int,
) -> LossOut:
    """-sum over the target's `top` likeliest draft tokens of p log q, p as it is (HASS, eq. 2)."""
    ids_K = None if vocab is None else vocab.ids_K

    def part(row_Q: Tensor, teacher_row_Q: Tensor) -> Tensor:
        log_q_QK = F.log_softmax(wide(head(ready_RD[row_Q])) / teacher.temperature, dim=-1)
        with torch.no_grad():
            log_p_QK = teacher.distribution(teacher_row_Q, ids_K).log_p_QK
            best_QC, at_QC = log_p_QK.topk(min(top, log_p_QK.shape[-1]), dim=-1)
        return -(best_QC.exp() * log_q_QK.gather(1, at_QC)).sum()

    loss = wide(ready_RD).new_zeros(())
    for row_Q, teacher_row_Q in zip(
        torch.split(aim.row_Q, ROWS_AT_ONCE),
        torch.split(aim.teacher_row_Q, ROWS_AT_ONCE),
        strict=True,
    ):
        loss = loss + checkpoint(part, row_Q, teacher_row_Q, use_reentrant=False)
    count = torch.full((), float(aim.row_Q.numel()), device=ready_RD.device)
    return LossOut(loss, count, {"topk": (loss.detach(), count)})


def agreement_loss(
    steps: Sequence[Tensor],
    rows: Sequence[Tensor],
    temperature: float,
    share: tuple[int, int] = (0, 1),
) -> LossOut:
    """InfoNCE between the steps' states of the same feature, the other rows of a slice being the
    negatives (CORAL, sec. 3.2). `steps` are flat states [R, D], `rows` the flat rows of each that
    hold those features, in one order. Of the slices those numbered `share[0]` modulo `share[1]` are
    compared here. Metric `agreement`: mean cosine of states of one feature."""
    pairs = [(a, b) for a in range(len(steps)) for b in range(a)]
    all_slices = list(zip(*(torch.split(r, NEGATIVES) for r in rows), strict=True))
    here = all_slices[share[0] :: share[1]]
    count = torch.full((), float(sum(len(s[0]) for s in here)), device=rows[0].device)
    total = wide(steps[0]).new_zeros(())
    alike = total.detach()
    for slices in here:
        unit = [F.normalize(wide(s[r]), dim=-1) for s, r in zip(steps, slices, strict=True)]
        own_Q = torch.arange(len(slices[0]), device=total.device)
        for a, b in pairs:
            near_QQ = unit[a] @ unit[b].t()
            total = total + F.cross_entropy(near_QQ / temperature, own_Q, reduction="sum")
            alike = alike + near_QQ.detach().diagonal().sum()
    number = max(1, len(pairs))
    return LossOut(total / number, count, {"agreement": (alike / number, count)})
