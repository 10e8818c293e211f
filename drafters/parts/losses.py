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
from specctl.drafters.parts.align import aim as aim_at
from specctl.drafters.parts.batch import LossOut, TrainBatch
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import RecipeError, nearest

KINDS = ("ce", "kl", "rkl", "jsd", "tv", "lk_alpha", "lk_hybrid")
HYBRID_RATE = 3.0
CHUNK_ELEMENTS = 2**25  # float32 logits alive at once: 128 MiB a copy

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
class Judge:
    """The target's laws at one temperature, ready to be asked by several losses: raw logits, their
    log-normalisers and their most probable ids. Rows that are never asked hold zeros."""

    logits_RV: Tensor
    log_z_R: Tensor
    best_R: Tensor
    temperature: float

    @classmethod
    @torch.no_grad()
    def of(cls, logits_RV: Tensor, row_N: Tensor, options: LossOptions) -> Judge:
        """Reads the whole vocabulary once per row of `row_N`."""
        log_z_R = torch.zeros(len(logits_RV), device=logits_RV.device)
        best_R = torch.zeros_like(log_z_R, dtype=torch.long)
        for rows in torch.split(row_N, options.chunk or _fitting_chunk(logits_RV.shape[-1])):
            part_NV = _scaled(logits_RV[rows].float(), options.temperature)
            log_z_R[rows] = part_NV.logsumexp(-1)
            best_R[rows] = part_NV.argmax(-1)
        return cls(logits_RV, log_z_R, best_R, options.temperature)

    def log_p(self, row_N: Tensor, ids_K: Tensor | None) -> Tensor:
        """[N, K] float32: log p at the draft ids (None = all), not renormalised."""
        picked = self.logits_RV[row_N] if ids_K is None else self.logits_RV[row_N[:, None], ids_K]
        return _scaled(picked.float(), self.temperature) - self.log_z_R[row_N, None]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _fitting_chunk(width: int) -> int:
    return max(64, CHUNK_ELEMENTS // width)


@dataclass(frozen=True, slots=True)
class Laws:
    """One slice of rows over the draft ids: log p, log p renormalised there, log q."""

    log_p_NK: Tensor
    log_r_NK: Tensor
    log_q_NK: Tensor


def laws(draft_NK: Tensor, judge: Judge, row_N: Tensor, ids_K: Tensor | None) -> Laws:
    """Laws of raw draft logits and of the target at rows `row_N`."""
    log_q_NK = F.log_softmax(_scaled(draft_NK.float(), judge.temperature), dim=-1)
    log_p_NK = judge.log_p(row_N, ids_K)
    if ids_K is None:
        return Laws(log_p_NK, log_p_NK, log_q_NK)
    return Laws(log_p_NK, log_p_NK - log_p_NK.logsumexp(-1, keepdim=True), log_q_NK)


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
    state_RD: Tensor,
    head: Head,
    aim: Aim,
    vocab: VocabMap | None,
    options: LossOptions,
    judge: Judge | None = None,
) -> LossOut:
    """Sum of the loss over the rows of `aim`, in slices; each slice's logits are recomputed in the
    backward pass when there is more than one, so that few [chunk, V] copies exist at a time.

    `judge` may be shared by losses over the same batch. Metrics: `top1` (the draft's first choice
    is the target's, or the label without a teacher) and, with a teacher, `alpha`; both over all
    rows, cut or not.
    """
    if judge is None and aim.teacher_RV is not None:
        judge = Judge.of(aim.teacher_RV, aim.judge_N, options)
    ids_K = None if vocab is None else vocab.ids_K
    row_V = None if vocab is None else vocab.to_draft()

    def part(row_N: Tensor, label_N: Tensor, judge_N: Tensor) -> Tensor:
        draft_NK = head(state_RD[row_N])
        with torch.no_grad():
            first_N = draft_NK.argmax(-1) if ids_K is None else ids_K[draft_NK.argmax(-1)]
        if judge is None:
            loss, count = _label_loss(draft_NK, label_N, row_V)
            top1 = (first_N == label_N).sum()
            return torch.stack([loss, count, top1, torch.zeros_like(loss)])
        of, best_N = laws(draft_NK, judge, judge_N, ids_K), judge.best_R[judge_N]
        if options.kind == "ce":
            loss, count = _label_loss(draft_NK, label_N, row_V)
        else:
            loss, count = _law_loss(of, best_N, row_V, options.kind)
        with torch.no_grad():
            top1, alpha = (first_N == best_N).sum(), acceptance(of).sum()
        return torch.stack([loss, count, top1, alpha])

    size = options.chunk or _fitting_chunk(_width(judge, vocab))
    slices = list(
        zip(*(torch.split(x, size) for x in (aim.row_N, aim.label_N, aim.judge_N)), strict=True)
    )
    total_4 = state_RD.new_zeros(4, dtype=torch.float32)
    for rows in slices:
        again = len(slices) > 1 and torch.is_grad_enabled()
        total_4 = total_4 + (checkpoint(part, *rows, use_reentrant=False) if again else part(*rows))
    number = torch.tensor(float(aim.row_N.numel()), device=state_RD.device)
    metrics = {"top1": (total_4[2].detach(), number)}
    if judge is not None:
        metrics["alpha"] = (total_4[3].detach(), number)
    return LossOut(total_4[0], total_4[1].detach(), metrics)


def _width(judge: Judge | None, vocab: VocabMap | None) -> int:
    """Columns of a slice's logits; a guess when nothing tells."""
    if vocab is not None:
        return vocab.size
    return 2**15 if judge is None else judge.logits_RV.shape[-1]


def judge_of(batch: TrainBatch, options: LossOptions) -> Judge | None:
    """One judge for every loss over `batch`, however far its rows look ahead."""
    if batch.teacher_BSV is None:
        return None
    return Judge.of(batch.teacher_BSV.flatten(0, 1), aim_at(batch, 1).judge_N, options)


def _label_loss(draft_NK: Tensor, label_N: Tensor, row_V: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum and count of hard cross-entropy over the labels that were not cut."""
    row_N = label_N if row_V is None else row_V[label_N]
    loss = F.cross_entropy(draft_NK.float(), row_N, ignore_index=-1, reduction="sum")
    return loss, (row_N >= 0).sum().float()


def _law_loss(of: Laws, best_N: Tensor, row_V: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Sum and count of a divergence over the rows whose best target id was not cut."""
    loss_N = _DIVERGENCES[kind](of)
    kept_N = torch.ones_like(best_N, dtype=torch.bool)
    if row_V is not None and kind not in _NEEDS_NO_RENORMALISING:
        kept_N = row_V[best_N] >= 0
    return (loss_N * kept_N).sum(), kept_N.sum().float()


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
