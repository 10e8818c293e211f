"""KL(p || q) of a slice of rows, its metrics and its gradient in one go: what most drafters are
trained with, where a compiled function does it (`models/native/kl.py`); None where none does.
Letters: K draft vocabulary, Q picked rows, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specctl.drafters.losses.teacher import TeacherLogits, wide
from specctl.models.native.kl import TargetRows, compared, is_compiled_for


def fused_kl(
    draft_QK: Tensor,
    teacher: TeacherLogits,
    row_Q: Tensor,
    ids_K: Tensor | None,
    draft_row_V: Tensor | None,
    weight_Q: Tensor | None = None,
) -> Tensor | None:
    """[4]: KL summed over the rows that can be learned, their number, both weighted, and top1 and
    alpha of raw draft logits at the teacher's temperature. Only the first has a gradient."""
    if not is_compiled_for(draft_QK, teacher.source):
        return None
    of = teacher.rows(row_Q, ids_K)
    found: Tensor | None = _FusedKL.apply(  # type: ignore[no-untyped-call]
        wide(draft_QK), of, draft_row_V, weight_Q
    )
    return found


@torch.no_grad()
def fused_rows(
    draft_QK: Tensor,
    teacher: TeacherLogits,
    row_Q: Tensor,
    ids_K: Tensor | None,
    draft_row_V: Tensor | None,
) -> Tensor | None:
    """[4, Q]: the same row by row; KL is 0 of rows that cannot be learned."""
    if not is_compiled_for(draft_QK, teacher.source):
        return None
    found = compared(wide(draft_QK), teacher.rows(row_Q, ids_K), draft_row_V)
    return None if found is None else found[0].T.float()


class _FusedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft_QK: Tensor,
        of: TargetRows,
        draft_row_V: Tensor | None,
        weight_Q: Tensor | None,
    ) -> Tensor | None:
        found = compared(draft_QK, of, draft_row_V)
        if found is None:
            return None
        figures_Q4, gradient_QK = found
        if weight_Q is not None:
            figures_Q4[:, :2] *= weight_Q[:, None]
            gradient_QK *= weight_Q[:, None]
        ctx.save_for_backward(gradient_QK)
        return figures_Q4.sum(0).float()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_QK,) = ctx.saved_tensors
        weight = float(outer[0][0])
        return gradient_QK if weight == 1.0 else gradient_QK * weight, None, None, None
