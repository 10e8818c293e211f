"""SpecDec++ (arXiv 2405.19715): stop when a rejection among the drafted tokens is likely enough.

The optimal stop of the drafting process is a threshold on the chance that at least one drafted
token is rejected, 1 - prod_i a_i > h. A small network reads the drafter's state behind token i and
gives a_i. The newest token has not been read by the drafter yet, so the product lags one token.
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep
from specctl.runtime.stops.learned import StateReader


@dataclass(slots=True)
class SpecDecPp(StateReader):
    """Stops behind a token when 1 - prod a > `threshold`, never before `least` tokens."""

    name = "specdec-pp"
    lag: ClassVar[int] = 1
    soft: ClassVar[bool] = True
    rejected: ClassVar[float] = 6.0
    threshold: float = 0.3
    least: int = 2
    kept_B: Tensor | None = field(default=None, init=False, repr=False)

    def stops(self, step: DraftStep) -> Tensor:
        if step.index == 0 or self.kept_B is None:
            self.kept_B = torch.zeros(len(step.row_B), device=step.row_B.device)
        if step.index > 0:
            self.kept_B = self.kept_B + F.logsigmoid(self.output_B(step))
        if step.index + 1 < self.least:
            return torch.zeros_like(step.row_B, dtype=torch.bool)
        return -torch.expm1(self.kept_B) > self.threshold


STOP = Plugin(
    "specdec-pp", "where a rejection is likely", "https://arxiv.org/abs/2405.19715", SpecDecPp
)
