"""ConfidenceHead: the drafter's own estimate of being accepted (DSpark, arXiv 2607.05147).

A place's estimate is made before its token is drawn, and is trained on the acceptance sum_v
min(p, q). The product of the estimates so far is the chance that the draft is still alive.
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep, StopRule


@dataclass(slots=True)
class ConfidenceHead(StopRule):
    """Stop where the whole draft is accepted with less than `threshold`."""

    threshold: float = 0.3
    alive_B: Tensor = field(default_factory=lambda: torch.ones(1), init=False)

    def stops(self, step: DraftStep) -> Tensor:
        confidence_B = step.state.confidence()
        self.alive_B = confidence_B if step.index == 0 else self.alive_B * confidence_B
        return self.alive_B < self.threshold


STOP = Plugin(
    "confidence-head",
    "by the drafter's estimate",
    "https://arxiv.org/abs/2607.05147",
    ConfidenceHead,
)
