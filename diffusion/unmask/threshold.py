"""Confidence-threshold parallel decoding of Fast-dLLM (https://arxiv.org/abs/2505.22618).

Every token of the block whose confidence is above the threshold stays, at least the most confident.
Tokens kept together are guessed independently of each other, so the text is approximate; with a
threshold of 1 a pass keeps one token, which is the plain schedule of one token a pass.
Letters: Q picked rows.
"""

from __future__ import annotations

from torch import Tensor

from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.unmask.base import BlockStep, Unmask, best_of


class ThresholdUnmask(Unmask):
    """All that are confident enough."""

    mark = "threshold"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def keep(self, guess: CanvasGuess, step: BlockStep) -> Tensor:
        inside = guess.within(step.first, step.last)
        best = best_of(guess.confidence_Q, inside, 1)
        return best | (inside & (guess.confidence_Q > self.threshold))
