"""Losses of a draft head against the target's distribution: sums with counts, float32, in chunks of
rows.

Kinds: ce, -log q(label), the label being the text (sequence-level distillation), and the LOSS of
each module of this folder (divergences.py). With a trimmed vocabulary a loss that is not `whole`
skips rows whose most probable target token (for `ce`: whose label) was cut.
Letters: D hidden width, K draft vocabulary, Q picked rows, R flat rows, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import HeadRows, LossOut, TrainBatch
from specctl.core.plugins import Plugins, plugins
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows, teacher_of, teacher_rows
from specctl.drafters.losses.divergences import (
    Loss,
    RowDistributions,
    acceptance,
    distributions,
    kl,
)
from specctl.drafters.losses.fused_kl import fused_kl, fused_rows
from specctl.drafters.losses.teacher import TeacherLogits, wide
from specctl.drafters.option_checks import OneOf, Within
from specctl.models.native.kl import is_read
from specctl.models.sliced_head import Head, LinearHead, Rows, over_slices, sum_slices

__all__ = [
    "KINDS",
    "LinearHead",
    "LossOptions",
    "TeacherLogits",
    "accepted",
    "feature_loss",
    "head_loss",
    "joined",
    "teacher_logits",
    "weighted_sum",
    "with_stretch",
]  # fmt: skip

LOSSES: Plugins[Loss] = plugins("specctl.drafters.losses", "LOSS")
KINDS = ("ce", *LOSSES)
CACHED, AT_ONCE = 2**20, 2**26  # logits of a slice: what a CPU's cache holds, what keeps a GPU busy
Teacher = TypeVar("Teacher", TeacherLogits, TeacherLogits | None)
LEAST_ROWS = 128  # of a slice: fewer, and adding up the head's gradient costs more than it saves


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How a head is compared with the target. `chunk`: rows per slice, None fits the vocabulary."""

    kind: str = "kl"
    temperature: float = 1.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        OneOf(KINDS).check("loss", self.kind)
        Within(0.01, 1_000).check("temperature", self.temperature)
        if self.chunk is not None:
            Within(most=10**9).check("chunk", self.chunk)


def fitting_chunk(width: int, device: torch.device) -> int:
    """Rows of a slice over that many ids. V = 6,144, 2,304 rows, one core of an AVX512 machine:
    0.32 s a loss with its gradient in slices of 128 or 256 rows, 0.42 of 1,024, 0.58 in one."""
    elements = CACHED if device.type == "cpu" else AT_ONCE
    return max(LEAST_ROWS, elements // width)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A draft head against the target, or against the text where there is no teacher. `ids_K` are
    the draft's target ids (None = all), `row_V` the draft row of a target id, -1 where cut."""

    options: LossOptions
    teacher: TeacherLogits | None
    ids_K: Tensor | None
    row_V: Tensor | None

    @classmethod
    def of(
        cls, options: LossOptions, teacher: TeacherLogits | None, vocab: VocabMap | None
    ) -> Comparison:
        if vocab is None:
            return cls(options, teacher, None, None)
        return cls(options, _picked(teacher, options, vocab), vocab.ids_K, vocab.to_draft())

    def sums(
        self,
        draft_QK: Tensor,
        row_Q: Tensor,
        label_Q: Tensor,
        teacher_row_Q: Tensor,
        weight_Q: Tensor | None = None,
    ) -> Tensor:
        """[4]: loss and its count, both weighted, top1, alpha."""
        if self.teacher is None:
            loss, count = _label_loss(draft_QK, label_Q, self.row_V, weight_Q)
            top1 = self._is_first(draft_QK, label_Q).sum()
            return torch.stack([loss, count, top1, torch.zeros_like(loss)])
        if self.options.kind == "kl":
            given = self.teacher, teacher_row_Q, self.ids_K, self.row_V
            found = fused_kl(draft_QK, *given, weight_Q)
            if found is not None:
                return found
        distribution = self.teacher.distribution(teacher_row_Q, self.ids_K)
        of = distributions(
            draft_QK, distribution.log_p_QK, self.options.temperature, self.ids_K is None
        )
        if self.options.kind == "ce":
            loss, count = _label_loss(draft_QK, label_Q, self.row_V, weight_Q)
        else:
            learnable_Q = self._learnable(distribution.best_Q)
            loss, count = _distribution_loss(of, learnable_Q, self.options.kind, weight_Q)
        with torch.no_grad():
            top1 = self._is_first(draft_QK, distribution.best_Q).sum()
            alpha = acceptance(of).sum()
        return torch.stack([loss, count, top1, alpha])

    @torch.no_grad()
    def rows(
        self, draft_QK: Tensor, row_Q: Tensor, label_Q: Tensor, teacher_row_Q: Tensor
    ) -> Tensor:
        """[4, Q], row by row: KL(p || q), whether the row can be learned, top1, alpha."""
        assert self.teacher is not None, "rows are selected by how far they are off the target"
        if self.options.kind == "kl":
            given = self.teacher, teacher_row_Q, self.ids_K, self.row_V
            found = fused_rows(draft_QK, *given)
            if found is not None:
                return found
        distribution = self.teacher.distribution(teacher_row_Q, self.ids_K)
        of = distributions(
            draft_QK, distribution.log_p_QK, self.options.temperature, self.ids_K is None
        )
        top1_Q = self._is_first(draft_QK, distribution.best_Q)
        return torch.stack([kl(of), self._learnable(distribution.best_Q), top1_Q, acceptance(of)])

    @torch.no_grad()
    def chances(
        self, draft_QK: Tensor, row_Q: Tensor, label_Q: Tensor, teacher_row_Q: Tensor
    ) -> Tensor:
        """[1, Q]: the chance that what is drafted passes: alpha; for `ce` and without a teacher the
        draft's probability of the label, 0 where that was cut."""
        if self.teacher is not None and self.options.kind != "ce":
            return self.rows(draft_QK, row_Q, label_Q, teacher_row_Q)[3:]
        column_Q = label_Q if self.row_V is None else self.row_V[label_Q]
        log_q_Q = -F.cross_entropy(wide(draft_QK), column_Q.clamp(min=0), reduction="none")
        return torch.where(column_Q >= 0, log_q_Q.exp(), 0.0)[None]

    def _learnable(self, best_Q: Tensor) -> Tensor:
        """False where a distribution that is restricted to the draft ids has lost its best one."""
        if self.row_V is None or (self.options.kind in LOSSES and LOSSES[self.options.kind].whole):
            return torch.ones_like(best_Q, dtype=torch.bool)
        return self.row_V[best_Q] >= 0

    @torch.no_grad()
    def _is_first(self, draft_QK: Tensor, id_Q: Tensor) -> Tensor:
        """Bool [Q]: no draft id has a larger logit than this target id. The largest value is found
        several times faster than its place."""
        row_Q = id_Q if self.row_V is None else self.row_V[id_Q]
        own_Q = draft_QK.gather(1, row_Q.clamp(min=0)[:, None])[:, 0]
        return (row_Q >= 0) & (own_Q == draft_QK.amax(-1))


def head_loss(
    state_RD: Tensor,
    head: Head,
    aim: AlignedRows,
    vocab: VocabMap | None,
    options: LossOptions,
    teacher: TeacherLogits | None = None,
) -> LossOut:
    """Sum of the loss over the rows of `aim`, in slices (see `sliced`). A `LinearHead` or a linear
    module as head is smallest and fastest; any other function will do.

    `teacher` may be shared by losses over the same batch. Metrics: `top1` (the draft's first choice
    is the target's, or the label without a teacher) and, with a teacher, `alpha`; both over all
    rows, cut or not, selected or not.
    """
    if teacher is None and aim.teacher_RV is not None:
        teacher = TeacherLogits.known(aim.teacher_RV, options.temperature)
    compare = Comparison.of(options, teacher, vocab)
    size = options.chunk or fitting_chunk(_width(teacher, vocab), state_RD.device)
    number = torch.full((), float(aim.row_Q.numel()), device=state_RD.device)
    if aim.select is None:
        total_4 = sum_slices(state_RD, head, _slices(aim, size), compare.sums)
        metrics = {"top1": (total_4[2].detach(), number), "alpha": (total_4[3].detach(), number)}
        if teacher is None:
            del metrics["alpha"]
        return LossOut(total_4[0], total_4[1].detach(), metrics, aim.part)
    whole = replace(aim, weight_Q=None)
    kl_Q, learnable_Q, top1_Q, alpha_Q = over_slices(
        state_RD, head, _slices(whole, size), compare.rows
    )
    keep_Q = learnable_Q > 0
    keep_Q[keep_Q.clone()] = aim.select(kl_Q[keep_Q])
    total_4 = sum_slices(state_RD, head, _slices(aim.only(keep_Q), size), compare.sums)
    metrics = {"top1": (top1_Q.sum(), number), "alpha": (alpha_Q.sum(), number)}
    metrics["selected"] = (keep_Q.sum(), (learnable_Q > 0).sum())
    return LossOut(total_4[0], total_4[1].detach(), metrics, aim.part)


def accepted(
    state_RD: Tensor,
    head: Head,
    aim: AlignedRows,
    vocab: VocabMap | None,
    options: LossOptions,
    teacher: TeacherLogits | None,
) -> Tensor:
    """[Q]: the chance that what is drafted from each row of `aim` passes, without a gradient."""
    if teacher is None and aim.teacher_RV is not None:
        teacher = TeacherLogits.known(aim.teacher_RV, options.temperature)
    compare = Comparison.of(options, teacher, vocab)
    size = options.chunk or fitting_chunk(_width(teacher, vocab), state_RD.device)
    return over_slices(state_RD, head, _slices(aim, size), compare.chances)[0]


def _slices(aim: AlignedRows, size: int) -> list[Rows]:
    rows = [aim.row_Q, aim.label_Q, aim.teacher_row_Q]
    rows += [] if aim.weight_Q is None else [aim.weight_Q]
    return list(zip(*(torch.split(each, size) for each in rows), strict=True))


def _width(teacher: TeacherLogits | None, vocab: VocabMap | None) -> int:
    """Columns of a slice's logits, a guess when nothing tells. Those of the target's whole
    vocabulary count where they are not yet read."""
    if teacher is not None and (vocab is None or teacher.log_z_R is None):
        return teacher.logits_RV.shape[-1]
    return 2**15 if vocab is None else vocab.size


def teacher_logits(
    batch: TrainBatch, options: LossOptions, vocab: VocabMap | None = None
) -> TeacherLogits | None:
    """One teacher for every loss over `batch`, however far its rows look ahead; with the draft
    vocabulary that all of them compare, its columns are picked once."""
    teacher = teacher_of(batch)
    if teacher is None:
        return None
    size = options.chunk or fitting_chunk(teacher.shape[-1], teacher.device)
    rows = teacher_rows(batch)
    found = TeacherLogits.of(teacher, rows, options.temperature, size)
    if vocab is None:
        return found
    if isinstance(teacher, HeadRows) and batch.part is None:
        size = options.chunk or fitting_chunk(vocab.size, teacher.device)
        return found.made(vocab.ids_K, rows, size)
    return _picked(found, options, vocab)


def _picked(teacher: Teacher, options: LossOptions, vocab: VocabMap) -> Teacher:
    """With the columns of the draft vocabulary side by side. The compiled KL picks as it reads:
    2,048 of 6,144 columns of 2,304 rows take 2 ms so, beforehand 33 (one core, AVX512)."""
    if teacher is None or (options.kind == "kl" and is_read(teacher.logits_RV)):
        return teacher
    return teacher.over(vocab.ids_K)


def _label_loss(
    draft_QK: Tensor, label_Q: Tensor, row_V: Tensor | None, weight_Q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum and count of hard cross-entropy over the labels that were not cut."""
    row_Q = label_Q if row_V is None else row_V[label_Q]
    if weight_Q is not None:
        loss_Q = F.cross_entropy(wide(draft_QK), row_Q, ignore_index=-1, reduction="none")
        return (loss_Q * weight_Q).sum(), (weight_Q * (row_Q >= 0)).sum().to(loss_Q.dtype)
    loss = F.cross_entropy(wide(draft_QK), row_Q, ignore_index=-1, reduction="sum")
    return loss, (row_Q >= 0).sum().to(loss.dtype)


def _distribution_loss(
    of: RowDistributions, learnable_Q: Tensor, kind: str, weight_Q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum and count of a divergence over the rows that can be learned."""
    loss_Q = LOSSES[kind].of(of)
    share_Q = learnable_Q if weight_Q is None else learnable_Q * weight_Q
    return (loss_Q * share_Q).sum(), share_Q.sum().to(loss_Q.dtype)


def feature_loss(state_RD: Tensor, aim: AlignedRows, target_RD: Tensor) -> LossOut:
    """SmoothL1, the mean over the width, between drafted states and the target's (EAGLE, eq. 3). A
    target that learns, too, does not learn to be easy to hit: its side has no gradient."""
    wanted_QD = wide(target_RD.detach()[aim.teacher_row_Q])
    loss = F.smooth_l1_loss(wide(state_RD[aim.row_Q]), wanted_QD, reduction="sum")
    count = torch.full((), float(aim.row_Q.numel()), device=state_RD.device)
    return LossOut(
        loss / state_RD.shape[-1], count, {"feature": (loss.detach() / state_RD.shape[-1], count)}
    )


def joined(out: LossOut, term: LossOut, weight: float = 1.0) -> LossOut:
    """A loss with the mean of another added to its own mean, though they count other rows. The
    means are those of whole rows, also where this process has a stretch of them."""
    count, other = out.count, term.count
    if out.part is not None:
        count, other = out.part.total(torch.stack([count, other.to(count)]))
    scale = weight * count / other.clamp(min=1.0)
    metrics = {**out.metrics, **term.metrics}
    return replace(out, sum=out.sum + term.sum * scale, metrics=metrics)


def with_stretch(out: LossOut, states: Sequence[Tensor]) -> LossOut:
    """`out`, to which every one of the states adds zero where processes share rows: a stretch
    without a token to predict must take part in the exchange of gradients, too."""
    if out.part is None:
        return out
    return replace(out, sum=out.sum + 0.0 * torch.stack([x.sum() for x in states]).sum())


def weighted_sum(parts: list[tuple[float, LossOut]]) -> LossOut:
    """A weighted mean of several losses as one sum and count; metrics are those of the first part,
    the others under name/step."""
    first = parts[0][1]
    total = torch.stack([weight * out.sum for weight, out in parts]).sum()
    count = torch.stack([weight * out.count for weight, out in parts]).sum()
    metrics = dict(first.metrics)
    for step, (_, out) in enumerate(parts[1:], start=1):
        metrics.update({f"{name}/{step}": pair for name, pair in out.metrics.items()})
    return LossOut(total, count, metrics, first.part)
