"""AdaEAGLE's length predictor (arXiv 2412.18910): the length is chosen before drafting.

A small network reads the embedding of the root and the target's last state before it, and predicts
how many tokens will be accepted; that many are drafted, with no decision per token. Where it is
none, the drafter is not even called. A drafter that keeps no state of the target (an independent
language model) shows its own state behind its first pass instead; then one token is drafted at
least. What is drafted in vain costs a pass of the drafter, what is not drafted a pass of the
target; so training makes a length that is too short weigh `too_short` times as much (asymmetric
L1; how much is our choice).
Letters: B rows, D hidden width, F figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import RoundView, StepState
from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep
from specctl.runtime.stops.learned import StateReader, num_features


@dataclass(slots=True)
class AdaEagle(StateReader):
    """Drafts the predicted length plus `threshold`, rounded."""

    name = "ada-eagle"
    lengths: ClassVar[bool] = True
    too_short: ClassVar[float] = 2.0
    threshold: float = 0.0
    wanted_B: Tensor | None = field(default=None, init=False, repr=False)
    is_decided: bool = field(default=False, init=False, repr=False)

    def before(self, view: RoundView, state: StepState) -> Tensor | None:
        """[B, F]: what is read before the drafter's first pass, each part of its own scale."""
        known_B2D = state.known(view)
        if known_B2D is None:
            return None
        return F.layer_norm(known_B2D.float(), known_B2D.shape[-1:]).flatten(1)

    def planned(self, view: RoundView, state: StepState) -> Tensor | None:
        known_BF = self.before(view, state)
        self.is_decided = known_BF is not None and not self._reads_drafter(known_BF)
        if known_BF is None or not self.is_decided:
            return None
        return (self.said_B(known_BF) + self.threshold).round().long()

    def _reads_drafter(self, known_BF: Tensor) -> bool:
        """A file of version 0.1.0 reads the drafter's own state, which is half as wide."""
        return self.net is not None and 2 * num_features(self.net) == known_BF.shape[1]

    def stops(self, step: DraftStep) -> Tensor | None:
        if self.is_decided:
            return None
        if step.index == 0 or self.wanted_B is None:
            self.wanted_B = (self.output_B(step) + self.threshold).round()
        return step.index + 1 >= self.wanted_B


STOP = Plugin("ada-eagle", "at a predicted length", "https://arxiv.org/abs/2412.18910", AdaEagle)
