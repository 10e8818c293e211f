"""Losses of a draft head against the target's law: sums with counts, float32, in chunks of rows.

p is the target's law, q the draft's, both at one temperature; alpha = sum_v min(p, q) is the chance
that a token drawn from q passes rejection sampling. Kinds:

ce         -log q(label), the label being the text (sequence-level distillation)
kl         KL(p || q)              rkl   KL(q || p)
jsd        Jensen-Shannon          tv    1 - alpha           (DistillSpec, arXiv 2310.08461, eq. 2)
lk_alpha   -log alpha              lk_hybrid  w KL + (1 - w) TV with w = exp(-3 alpha), w detached
           (LK losses, arXiv 2602.23881)

Trimmed vocabulary: `tv` and `lk_alpha` compare with the full p, whose cut ids simply cannot be
drafted. The others compare with p restricted to the kept ids and renormalised, and skip rows whose
most probable target token (for `ce`: whose label) was cut. Letters: N rows, V target vocabulary,
K draft vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specctl.drafters.parts.align import Aim
from specctl.drafters.parts.batch import LossOut
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import RecipeError, nearest

KINDS = ("ce", "kl", "rkl", "jsd", "tv", "lk_alpha", "lk_hybrid")
HYBRID_RATE = 3.0
CHUNK_ELEMENTS = 2**24

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How a head is compared with the target. `chunk`: rows per slice, None fits the vocabulary."""

    kind: str = "kl"
    temperature: float = 1.0
    chunk: int | None = None


def check_kind(kind: str, where: str) -> None:
    if kind not in KINDS:
        raise RecipeError(
            f"unknown loss {kind!r}",
            where=where,
            expected="one of " + ", ".join(KINDS),
            do=f"write {nearest(kind, KINDS, 1)}",
        )


@dataclass(frozen=True, slots=True)
class Laws:
    """One slice of rows: log p over V and over the draft ids, log p renormalised there, log q."""

    log_p_NV: Tensor
    log_p_NK: Tensor
    log_r_NK: Tensor
    log_q_NK: Tensor


def laws(
    draft_NK: Tensor, target_NV: Tensor, ids_K: Tensor | None, temperature: float = 1.0
) -> Laws:
    """Laws of raw draft and target logits at a temperature."""
    log_q_NK = F.log_softmax(draft_NK.float() / temperature, dim=-1)
    log_p_NV = F.log_softmax(target_NV.float() / temperature, dim=-1)
    if ids_K is None:
        return Laws(log_p_NV, log_p_NV, log_p_NV, log_q_NK)
    log_p_NK = log_p_NV[:, ids_K]
    return Laws(log_p_NV, log_p_NK, log_p_NK - log_p_NK.logsumexp(-1, keepdim=True), log_q_NK)


def _kl(of: Laws) -> Tensor:
    return (of.log_r_NK.exp() * (of.log_r_NK - of.log_q_NK)).sum(-1)


def _rkl(of: Laws) -> Tensor:
    return (of.log_q_NK.exp() * (of.log_q_NK - of.log_r_NK)).sum(-1)


def _jsd(of: Laws) -> Tensor:
    p, q = of.log_r_NK.exp(), of.log_q_NK.exp()
    log_m = torch.logaddexp(of.log_r_NK, of.log_q_NK) - math.log(2.0)
    return 0.5 * (p * (of.log_r_NK - log_m) + q * (of.log_q_NK - log_m)).sum(-1)


def acceptance(of: Laws) -> Tensor:
    """[N]: alpha = sum_v min(p, q)."""
    return torch.minimum(of.log_p_NK, of.log_q_NK).exp().sum(-1)


def _tv(of: Laws) -> Tensor:
    return 1.0 - acceptance(of)


def _lk_alpha(of: Laws) -> Tensor:
    return -torch.minimum(of.log_p_NK, of.log_q_NK).logsumexp(-1)


def _lk_hybrid(of: Laws) -> Tensor:
    alpha_N = acceptance(of)
    weight_N = torch.exp(-HYBRID_RATE * alpha_N.detach())
    return weight_N * _kl(of) + (1.0 - weight_N) * (1.0 - alpha_N)


_DIVERGENCES: Mapping[str, Callable[[Laws], Tensor]] = {
    "kl": _kl,
    "rkl": _rkl,
    "jsd": _jsd,
    "tv": _tv,
    "lk_alpha": _lk_alpha,
    "lk_hybrid": _lk_hybrid,
}
_NEEDS_NO_RENORMALISING = frozenset({"tv", "lk_alpha"})


def head_loss(
    state_RD: Tensor, head: Head, aim: Aim, vocab: VocabMap | None, options: LossOptions
) -> LossOut:
    """Sum of the loss over the rows of `aim`, in slices; each slice's logits are recomputed in the
    backward pass when there is more than one, so that few [chunk, V] copies exist at a time.

    Metrics: `top1` (the draft's first choice is the target's, or the label without a teacher) and,
    with a teacher, `alpha`; both over all rows, cut or not.
    """
    ids_K = None if vocab is None else vocab.ids_K
    row_V = None if vocab is None else vocab.to_draft()

    def part(row_N: Tensor, label_N: Tensor, judge_N: Tensor) -> Tensor:
        draft_NK = head(state_RD[row_N])
        if aim.teacher_RV is None:
            return _from_labels(draft_NK, label_N, row_V, ids_K)
        target_NV = aim.teacher_RV[judge_N]
        return _from_teacher(draft_NK, target_NV, label_N, row_V, ids_K, options)

    size = options.chunk or _fitting_chunk(aim, vocab)
    slices = list(
        zip(*(torch.split(x, size) for x in (aim.row_N, aim.label_N, aim.judge_N)), strict=True)
    )
    total_4 = state_RD.new_zeros(4, dtype=torch.float32)
    for rows in slices:
        again = len(slices) > 1 and torch.is_grad_enabled()
        total_4 = total_4 + (checkpoint(part, *rows, use_reentrant=False) if again else part(*rows))
    number = torch.tensor(float(aim.row_N.numel()), device=state_RD.device)
    metrics = {"top1": (total_4[2].detach(), number)}
    if aim.teacher_RV is not None:
        metrics["alpha"] = (total_4[3].detach(), number)
    return LossOut(total_4[0], total_4[1].detach(), metrics)


def _fitting_chunk(aim: Aim, vocab: VocabMap | None) -> int:
    width = vocab.target_size if vocab is not None else 2**15
    if aim.teacher_RV is not None:
        width = aim.teacher_RV.shape[-1]
    return max(64, CHUNK_ELEMENTS // width)


def _from_labels(
    draft_NK: Tensor, label_N: Tensor, row_V: Tensor | None, ids_K: Tensor | None
) -> Tensor:
    """[loss sum, count, top1 sum, 0] of hard cross-entropy."""
    log_q_NK = F.log_softmax(draft_NK.float(), dim=-1)
    label_row_N = label_N if row_V is None else row_V[label_N]
    kept_N = label_row_N >= 0
    picked_N = log_q_NK.gather(-1, label_row_N.clamp(min=0)[:, None])[:, 0]
    loss = -(picked_N * kept_N).sum()
    first_N = draft_NK.argmax(-1) if ids_K is None else ids_K[draft_NK.argmax(-1)]
    top1 = (first_N == label_N).sum().float()
    return torch.stack([loss, kept_N.sum().float(), top1, torch.zeros_like(loss)])


def _from_teacher(
    draft_NK: Tensor,
    target_NV: Tensor,
    label_N: Tensor,
    row_V: Tensor | None,
    ids_K: Tensor | None,
    options: LossOptions,
) -> Tensor:
    """[loss sum, count, top1 sum, alpha sum] against the target's law."""
    of = laws(draft_NK, target_NV, ids_K, options.temperature)
    best_N = of.log_p_NV.argmax(-1)
    with torch.no_grad():
        first_N = draft_NK.argmax(-1) if ids_K is None else ids_K[draft_NK.argmax(-1)]
        top1, alpha = (first_N == best_N).sum().float(), acceptance(of).sum()
    if options.kind == "ce":
        loss, count, _, _ = _from_labels(draft_NK, label_N, row_V, ids_K)
        return torch.stack([loss, count, top1, alpha])
    loss_N = _DIVERGENCES[options.kind](of)
    kept_N = torch.ones_like(best_N, dtype=torch.bool)
    if row_V is not None and options.kind not in _NEEDS_NO_RENORMALISING:
        kept_N = row_V[best_N] >= 0
    return torch.stack([(loss_N * kept_N).sum(), kept_N.sum().float(), top1, alpha])


def weighted_sum(parts: list[tuple[float, LossOut]]) -> LossOut:
    """A weighted mean of several losses as one sum and count; metrics are those of the first part,
    the others under name/step."""
    first = parts[0][1]
    total = torch.stack([weight * out.sum for weight, out in parts]).sum()
    count = torch.stack([weight * out.count for weight, out in parts]).sum()
    metrics = dict(first.metrics)
    for step, (_, out) in enumerate(parts[1:], start=1):
        metrics.update({f"{name}/{step}": pair for name, pair in out.metrics.items()})
    return LossOut(total, count, metrics)
