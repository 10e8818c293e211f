"""AdaEAGLE's length predictor (arXiv 2412.18910): the length is chosen before drafting.

A small network reads the state behind the root and predicts how many tokens will be accepted; that
many are drafted, with no decision per token. It reads the drafter's state there, which of feature
drafters is a function of the target's own features. What is drafted in vain costs a pass of the
drafter, what is not drafted a pass of the target; so training makes a length that is too short
weigh `too_short` times as much (asymmetric L1; how much is our choice).
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep
from specctl.runtime.stops.learned import StateReader


@dataclass(slots=True)
class AdaEagle(StateReader):
    """Drafts the predicted length plus `threshold`, rounded, at least one token."""

    name: ClassVar[str] = "ada-eagle"
    lengths: ClassVar[bool] = True
    too_short: ClassVar[float] = 2.0
    threshold: float = 0.5
    wanted_B: Tensor | None = field(default=None, init=False, repr=False)

    def stops(self, step: DraftStep) -> Tensor:
        if step.index == 0 or self.wanted_B is None:
            self.wanted_B = (self.output_B(step) + self.threshold).round()
        return step.index + 1 >= self.wanted_B


STOP = Plugin("ada-eagle", "at a predicted length", "https://arxiv.org/abs/2412.18910", AdaEagle)
