"""KL(p || q) of a draft's logits with its gradient, as one compiled call on a CPU (kl.h).

PyTorch's operators for the same read and write the logits twenty times. What the call does not take
(another device or dtype, no compiler) is None, and those operators do it.
Letters: K draft vocabulary, Q picked rows, R flat rows, V target vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.models.native.library import Compared, ScoreRows, library


class TargetRows(NamedTuple):
    """What a draft's rows are compared with: rows `row_Q` of the raw scores [R, V] over the
    temperature. `ids_K`: their columns that count; None: these are the draft's ids. log_z and best
    id of the whole vocabulary where they are known."""

    score_RV: Tensor
    row_Q: Tensor
    temperature: float
    ids_K: Tensor | None = None
    log_z_Q: Tensor | None = None
    best_Q: Tensor | None = None


def log_z_and_best(of: TargetRows) -> tuple[Tensor, Tensor] | None:
    """Float32 and int64 [Q]: log sum_v e^(score / temperature) of rows and their best ids."""
    if (functions := _functions(of.score_RV)) is None:
        return None
    _check("row", of.row_Q, len(of.score_RV))
    Q, row_Q = len(of.row_Q), of.row_Q.contiguous()
    log_z_Q, best_Q = torch.empty(Q), torch.empty(Q, dtype=torch.long)
    call = ScoreRows(
        *(Q, of.score_RV.shape[1], torch.get_num_threads(), 1.0 / of.temperature),
        *(x.data_ptr() for x in (of.score_RV, row_Q, log_z_Q, best_Q)),
    )
    functions.read_scores(ctypes.byref(call))
    return log_z_Q, best_Q


def compared(
    draft_QK: Tensor, of: TargetRows, draft_row_V: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Float64 [Q, 4] and the gradient [Q, K] of the first by the draft's raw logits, row by row:
    KL with p renormalised over the draft ids, whether it was taken, whether the best ids agree,
    alpha. KL is not taken of rows whose best id has no draft row (`draft_row_V`, -1 there; None:
    all have one)."""
    draft_QK = draft_QK.detach().contiguous()
    if (functions := _functions(draft_QK, of.score_RV)) is None:
        return None
    (Q, K), threads, (R, V) = draft_QK.shape, torch.get_num_threads(), of.score_RV.shape
    _check("row", of.row_Q, R)
    if of.ids_K is not None:
        _check("id", of.ids_K, V)
    if (V if of.ids_K is None else len(of.ids_K)) != K:
        raise IndexError(f"{K} logits of a draft, {V} scores of a target and as many ids")
    if draft_row_V is not None:
        _check("draft row", draft_row_V, K, least=-1)
        _check(
            "best id", torch.tensor([V - 1]) if of.best_Q is None else of.best_Q, len(draft_row_V)
        )
    figures_Q4 = torch.empty(Q, 4, dtype=torch.float64)
    gradient_QK, aside = torch.empty_like(draft_QK), torch.empty(threads, K)
    given = (of.row_Q, of.ids_K, of.log_z_Q, of.best_Q, draft_row_V)
    read = [None if x is None else x.contiguous() for x in given]
    call = Compared(
        *(Q, K, V, threads, 1.0 / of.temperature),
        *(draft_QK.data_ptr(), of.score_RV.data_ptr()),
        *(None if x is None else x.data_ptr() for x in read),
        *(x.data_ptr() for x in (gradient_QK, aside, figures_Q4)),
    )
    functions.compare(ctypes.byref(call))
    return figures_Q4, gradient_QK


def _check(what: str, index: Tensor, size: int, least: int = 0) -> None:
    """What the compiled function would read without a look."""
    if len(index):
        low, high = (int(x) for x in index.aminmax())
        if not least <= low <= high < size:
            raise IndexError(f"{what} {low} to {high}: there are {size}")


def is_compiled_for(*given: Tensor) -> bool:
    """Whether these calls compare what is made of such tensors: numbers in a CPU's memory."""
    are_there = all(type(x) is Tensor and x.device.type == "cpu" for x in given)
    is_double = any(x.dtype == torch.float64 for x in given)
    return are_there and not is_double and library().functions is not None


def is_read(scores: object) -> bool:
    """Whether they read such scores where they lie."""
    return isinstance(scores, Tensor) and _functions(scores) is not None


def _functions(*logits: Tensor) -> ctypes.CDLL | None:
    """The compiled functions, for float32 numbers that lie one after another."""
    are_in_line = all(x.is_contiguous() and x.dtype == torch.float32 for x in logits)
    return library().functions if are_in_line and is_compiled_for(*logits) else None
