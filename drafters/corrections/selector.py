"""Choosing among the likeliest candidates of each slot: what corrections share whose distribution
is over C tokens only. Outside them it is -inf, so that a policy draws from, and reports, the
truncated distribution: verification is then exact for every other token, too.
Letters: C candidates, D hidden width, K draft vocabulary, M new nodes, P path, Q picked rows, X any
axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.vocab import VocabMap
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.teacher import wide


@dataclass(frozen=True, slots=True)
class BestTokens:
    """Draft rows of the likeliest tokens, best first, and their logits: [X, P, C] of slots."""

    rows: Tensor
    values: Tensor

    @classmethod
    def of(cls, base_XPK: Tensor, count: int) -> BestTokens:
        best = base_XPK.topk(min(count, base_XPK.shape[-1]), dim=-1)
        return cls(best.indices, best.values)


def spread(scores_XMC: Tensor, rows_XMC: Tensor, num_rows: int) -> Tensor:
    """[X, M, K]: these scores at their draft rows, -inf elsewhere."""
    blank = scores_XMC.new_full((*scores_XMC.shape[:-1], num_rows), -torch.inf)
    return blank.scatter(-1, rows_XMC, scores_XMC)


@torch.no_grad()
def forced_in(rows_QC: Tensor, label_Q: Tensor) -> Tensor:
    """[Q, C]: the candidates; a label that is none of them takes the last one's place. While
    training only: a draft is never shown the text."""
    is_there_Q = (rows_QC == label_Q[:, None]).any(-1)
    last_Q = torch.where(is_there_Q, rows_QC[:, -1], label_Q)
    return torch.cat([rows_QC[:, :-1], last_Q[:, None]], dim=-1)


def choice_loss(scores_QC: Tensor, rows_QC: Tensor, label_Q: Tensor) -> Tensor:
    """[Q]: cross-entropy of the label among the candidates."""
    at_Q = (rows_QC == label_Q[:, None]).to(torch.int8).argmax(-1)
    return F.cross_entropy(wide(scores_QC), at_Q, reduction="none")


@torch.no_grad()
def choice_metrics(
    scores_QC: Tensor,
    rows_QC: Tensor,
    learned: HeadLearned,
    vocab: VocabMap | None,
    temperature: float,
    is_met_Q: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """`top1` and `alpha` of the distribution over the candidates, from which is drafted; those of a
    head's loss are of the block's own logits. Without a teacher `top1` of the text alone.
    `is_met_Q`: rows that a draft can come to (None: all)."""
    aim, teacher = learned.rows, learned.teacher
    ids_QC = rows_QC if vocab is None else vocab.ids_K[rows_QC]
    first_Q = ids_QC.gather(1, scores_QC.argmax(-1, keepdim=True))[:, 0]
    is_met_Q = torch.ones_like(first_Q, dtype=torch.bool) if is_met_Q is None else is_met_Q
    number = is_met_Q.sum().float()
    if teacher is None:
        return {"top1": (((first_Q == aim.label_Q) & is_met_Q).sum(), number)}
    log_p_QC, best_Q = teacher.at(aim.teacher_row_Q, ids_QC), teacher.best(aim.teacher_row_Q)
    q_QC = (wide(scores_QC) / temperature).softmax(-1)
    alpha_Q = torch.minimum(log_p_QC.exp(), q_QC.to(log_p_QC)).sum(-1)
    top1 = ((first_Q == best_Q) & is_met_Q).sum()
    return {"top1": (top1, number), "alpha": ((alpha_Q * is_met_Q).sum(), number)}
