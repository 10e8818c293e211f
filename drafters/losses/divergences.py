"""Divergences of a draft's distribution from the target's, by the name that `loss` gives them.

p is the target's distribution, q the draft's, both at one temperature; alpha = sum_v min(p, q) is
the chance that a token drawn from q passes rejection sampling:

kl         KL(p || q)              rkl   KL(q || p)
jsd        Jensen-Shannon          tv    1 - alpha           (DistillSpec, arXiv 2310.08461, eq. 2)
lk_alpha   -log alpha              lk_hybrid  w KL + (1 - w) TV with w = exp(-3 alpha), w detached
           (LK losses, arXiv 2602.23881)

Trimmed vocabulary: `tv` and `lk_alpha` compare with the full p, whose cut ids simply cannot be
drafted; the others with p restricted to the kept ids and renormalised. Letters: Q picked rows, K
draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.drafters.losses.teacher import wide

HYBRID_RATE = 3.0


@dataclass(frozen=True, slots=True)
class Loss:
    """What a module of this folder defines as LOSS: row by row, how far the draft is off. It is
    `whole` if it compares with the full p, so that rows whose best token was cut count, too."""

    name: str
    summary: str
    paper: str
    of: Callable[[RowDistributions], Tensor]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class RowDistributions:
    """One slice of rows over the draft ids: log p, log p renormalised there, log q."""

    log_p_QK: Tensor
    log_r_QK: Tensor
    log_q_QK: Tensor


def distributions(
    draft_QK: Tensor, log_p_QK: Tensor, temperature: float, is_whole: bool
) -> RowDistributions:
    """Distributions of raw draft logits and of the target, both at the temperature; `is_whole`: the
    draft ids are all ids, so that p needs no renormalising."""
    scores_QK = wide(draft_QK)
    scores_QK = scores_QK if temperature == 1.0 else scores_QK / temperature
    log_q_QK = F.log_softmax(scores_QK, dim=-1)
    if is_whole:
        return RowDistributions(log_p_QK, log_p_QK, log_q_QK)
    return RowDistributions(log_p_QK, log_p_QK - log_p_QK.logsumexp(-1, keepdim=True), log_q_QK)


class _KL(torch.autograd.Function):
    """sum_v r (log r - log q), of which log r is given: the gradient of log q is -r. A loss over a
    large vocabulary mostly reads and writes; the passes that autograd would add are a fifth."""

    @staticmethod
    def forward(ctx: Any, log_r_QK: Tensor, log_q_QK: Tensor) -> Tensor:
        r_QK = log_r_QK.exp()
        ctx.save_for_backward(r_QK)
        return (log_r_QK - log_q_QK).mul_(r_QK).sum(-1)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor]:
        (r_QK,) = ctx.saved_tensors
        return None, r_QK.mul_(-outer[0][..., None])


def kl(of: RowDistributions) -> Tensor:
    assert not of.log_r_QK.requires_grad, "the target's side has no gradient"
    found: Tensor = _KL.apply(of.log_r_QK, of.log_q_QK)  # type: ignore[no-untyped-call]
    return found


def _rkl(of: RowDistributions) -> Tensor:
    return (of.log_q_QK.exp() * (of.log_q_QK - of.log_r_QK)).sum(-1)


def _jsd(of: RowDistributions) -> Tensor:
    p, q = of.log_r_QK.exp(), of.log_q_QK.exp()
    log_m = torch.logaddexp(of.log_r_QK, of.log_q_QK) - math.log(2.0)
    return 0.5 * (p * (of.log_r_QK - log_m) + q * (of.log_q_QK - log_m)).sum(-1)


def acceptance(of: RowDistributions) -> Tensor:
    """[N]: alpha = sum_v min(p, q)."""
    return torch.minimum(of.log_p_QK, of.log_q_QK).exp_().sum(-1)


def _tv(of: RowDistributions) -> Tensor:
    return 1.0 - acceptance(of)


def _lk_alpha(of: RowDistributions) -> Tensor:
    return -torch.minimum(of.log_p_QK, of.log_q_QK).logsumexp(-1)


def _lk_hybrid(of: RowDistributions) -> Tensor:
    alpha_Q = acceptance(of)
    weight_Q = torch.exp(-HYBRID_RATE * alpha_Q.detach())
    return weight_Q * kl(of) + (1.0 - weight_Q) * (1.0 - alpha_Q)


_DISTILLSPEC, _LK = "https://arxiv.org/abs/2310.08461", "https://arxiv.org/abs/2602.23881"
LOSS = (
    Loss("kl", "KL(p || q)", _DISTILLSPEC, kl),
    Loss("rkl", "KL(q || p)", _DISTILLSPEC, _rkl),
    Loss("jsd", "Jensen-Shannon", _DISTILLSPEC, _jsd),
    Loss("tv", "1 - alpha", _DISTILLSPEC, _tv, whole=True),
    Loss("lk_alpha", "-log alpha", _LK, _lk_alpha, whole=True),
    Loss("lk_hybrid", "w KL + (1 - w) TV", _LK, _lk_hybrid),
)
