"""Fed: the true rows that a drafter on the target's features reads in one call.

Letters: B rows, D hidden width, E head width, T fed tokens, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fed:
    """True rows fed at once, right-padded: tokens, the states beside them, their rotations, where
    the first of each row is written, and how many are real; `count_B`: where the host may not know
    that, which is being recorded; `shift_B`: how far positions are ahead of where rows lie;
    `has_axes`: some stand for an image, of which no single position gives the rotation."""

    ids_BT: Tensor
    state_BTD: Tensor
    rope_BT2E: Tensor
    start_B: Tensor
    counts: tuple[int, ...]
    count_B: Tensor | None = None
    shift_B: Tensor | None = None
    has_axes: bool = False

    @property
    def first_B(self) -> Tensor:
        """The position of the first in each row."""
        return self.start_B if self.shift_B is None else self.start_B + self.shift_B

    def newest(self, rows_BTX: Tensor) -> Tensor:
        """[B, 1, ...]: those of the last real row."""
        count_B = self.count_B
        if count_B is None:
            if min(self.counts) == self.ids_BT.shape[1]:
                return rows_BTX[:, -1:]
            count_B = torch.tensor(self.counts, device=rows_BTX.device)
        row_B = torch.arange(len(count_B), device=rows_BTX.device)
        return rows_BTX[row_B, count_B - 1][:, None]
