"""Truncation of a distribution: top-k, then top-p, then min-p, each of what the one before it left.

Equal to transformers' TopK-, TopP- and MinPLogitsWarper with one value per row (tests compare
them). Ties at the edge of top-k are kept, as there; a tie at the edge of top-p is kept whole,
where transformers keeps a part of it that depends on its sort.

On a CPU a compiled function finds the lowest score that is kept without sorting the vocabulary
(`models/native/cut.h`, benchmarks/draw_cost.py); chains that are drafted in one call are cut by the
same.
Letters: B rows, V target vocabulary, X any axes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from specctl.core.language_model import Truncation
from specctl.core.truncation import min_p_, top_k_, top_p_
from specctl.models.native.library import CutCall, RowCut, cuts_of, library

NONE = Truncation()


class Truncations:
    """Those of B rows, some of which cut something."""

    def __init__(self, rows: Sequence[Truncation], device: torch.device) -> None:
        self.rows, self._device = tuple(rows), device

    @classmethod
    def of(cls, rows: Sequence[Truncation], device: torch.device) -> Truncations | None:
        """None where no row cuts."""
        return None if all(row == NONE for row in rows) else cls(rows, device)

    def apply_(self, scores_BXV: Tensor) -> Tensor:
        """The float32 scores, -inf where they are cut: in place."""
        functions = library().functions if scores_BXV.device.type == "cpu" else None
        if functions is None or not scores_BXV.is_contiguous():
            return self._by_sorting(scores_BXV)
        B, X, V = scores_BXV.shape
        aside_V = torch.empty(V)
        call = CutCall(B, X, V, self._addresses, scores_BXV.data_ptr(), aside_V.data_ptr())
        functions.cut(ctypes.byref(call))
        return scores_BXV

    @cached_property
    def _addresses(self) -> ctypes.Array[RowCut]:
        return cuts_of(self.rows)

    def _by_sorting(self, scores_BXV: Tensor) -> Tensor:
        top_k_B11, top_p_B11, min_p_B11 = self._columns
        if top_k_B11 is not None:
            top_k_(scores_BXV, top_k_B11, max(row.top_k for row in self.rows))
        if top_p_B11 is not None:
            top_p_(scores_BXV, top_p_B11)
        if min_p_B11 is not None:
            min_p_(scores_BXV, min_p_B11)
        return scores_BXV

    @cached_property
    def _columns(self) -> list[Tensor | None]:
        """[B, 1, 1] of each; None where it is off in all rows."""
        columns = zip(*self.rows, strict=True)
        return [
            None
            if all(value == off for value in column)
            else torch.tensor(column, device=self._device)[:, None, None]
            for column, off in zip(columns, NONE, strict=True)
        ]
