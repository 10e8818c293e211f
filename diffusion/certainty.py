"""Certainty-forcing distillation, the objective of dParallel (https://arxiv.org/abs/2509.26488).

A masked diffusion model becomes certain of its tokens one after another, though it guesses all of
them in every pass. It learns from texts that it wrote itself, x0, masked as decoding by blocks
leaves them: of one block every token is masked with probability t, what stands before the block is
text, and all behind it is masked. With M the masked positions of the block, C those of them whose
likeliest token is already x0's, and z the logits at a position,

    L = - 1/|M| sum over M of  log softmax(z)[x0]  +  beta / |C|  sum over C of  H(softmax(z / T))

The first term keeps the model on its own texts (consistency), the second makes it certain where it
is right, and only there. As in the published code every row is masked twice, the second time where
the first is not, and both losses are added; t is 1/2, T 1/2, and beta 2 for LLaDA, 1 for Dream,
whose whole answer is one block. The published code lets a row go without a loss where its answer
ends with a block; here each block that decoding has is as likely as any other.
Letters: B rows, D hidden width, Q picked rows, S sequence, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.diffusion.model import MaskedLM


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows as decoding leaves them: what the model reads, and the masked positions of the block
    that is decoded (those behind it are masked too, and are not learned from)."""

    ids_BS: Tensor
    masked_BS: Tensor


def block_rows(
    ids_BS: Tensor,
    start: int,
    block: int,
    mask_id: int,
    random: torch.Generator,
    rate: float = 0.5,
) -> tuple[BlockRows, BlockRows]:
    """Mask answers, which begin at `start`, in a random block of each row, and once more with the
    rest of the block masked. `random` is a generator on the CPU."""
    rows, length = ids_BS.shape
    blocks = -(-(length - start) // block)
    first_B = start + block * torch.randint(blocks, (rows,), generator=random)
    place_S = torch.arange(length)
    inside_BS = (place_S >= first_B[:, None]) & (place_S < first_B[:, None] + block)
    behind_BS = (place_S >= first_B[:, None] + block).to(ids_BS.device)
    drawn_BS = torch.rand(rows, length, generator=random) < rate
    halves = (inside_BS & drawn_BS, inside_BS & ~drawn_BS)
    masks = [half_BS.to(ids_BS.device) for half_BS in halves]
    one, other = (
        BlockRows(ids_BS.masked_fill(masked_BS | behind_BS, mask_id), masked_BS)
        for masked_BS in masks
    )
    return one, other


@dataclass(frozen=True, slots=True)
class CertaintyLoss:
    """The two terms in nats, each the mean over rows of a row's mean, to which a row without such
    positions adds nothing; of the `masked` positions `right` were guessed rightly. `rows_masked`
    and `rows_right`: the rows that have any of either."""

    consistency: Tensor
    certainty: Tensor
    right: int
    masked: int
    rows_masked: int
    rows_right: int


def certainty_loss(
    model: MaskedLM, rows: BlockRows, ids_BS: Tensor, temperature: float, autocast: bool = False
) -> CertaintyLoss:
    """Both terms over masked rows of the texts `ids_BS`; `temperature` is the T of the entropy."""
    row_Q, place_Q = rows.masked_BS.nonzero(as_tuple=True)
    with torch.autocast(ids_BS.device.type, dtype=torch.bfloat16, enabled=autocast):
        state_BSD = model(rows.ids_BS)
        logits_QV = model.logits(state_BSD[row_Q, model.source(place_Q)])
    label_Q = ids_BS[row_Q, place_Q]
    right_Q = logits_QV.argmax(-1) == label_Q  # a choice of positions: nothing flows through it
    loss_Q = F.cross_entropy(logits_QV, label_Q, reduction="none")
    entropy_Q = entropy_of(logits_QV[right_Q] / temperature)
    count = len(ids_BS)
    return CertaintyLoss(
        _mean_of_rows(loss_Q, row_Q, count),
        _mean_of_rows(entropy_Q, row_Q[right_Q], count),
        int(right_Q.sum()),
        len(row_Q),
        len(set(row_Q.tolist())),
        len(set(row_Q[right_Q].tolist())),
    )


def entropy_of(logits_QV: Tensor) -> Tensor:
    """Entropy in nats, [Q]; tokens of logit -inf have no part in it nor in its gradient."""
    log_QV = logits_QV.log_softmax(-1)
    finite_QV = log_QV.masked_fill(log_QV == -torch.inf, 0.0)
    return -(log_QV.exp() * finite_QV).sum(-1)


def _mean_of_rows(value_Q: Tensor, row_Q: Tensor, count: int) -> Tensor:
    """The mean of each row's mean; a row without values counts as zero."""
    each_B = torch.bincount(row_Q, minlength=count).clamp(min=1).to(value_Q.dtype)
    return (value_Q / each_B[row_Q]).sum() / count
