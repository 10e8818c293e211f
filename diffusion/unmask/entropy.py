"""Entropy threshold, dParallel's decoding (https://arxiv.org/abs/2509.26488).

Every token of the block stays where the model's distribution has less entropy than the threshold,
in nats, and at least the one with the least. As with a threshold of confidence, tokens that are
kept together are guessed independently of each other, so the text is approximate. With a threshold
of 0 a pass keeps one token, in the order of entropy, which is Dream's own schedule by entropy.
Letters: Q picked rows.
"""

from __future__ import annotations

from torch import Tensor

from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.unmask.base import BlockStep, Unmask, best_of


class EntropyUnmask(Unmask):
    """All of which the model is certain enough."""

    mark = "entropy"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def keep(self, guess: CanvasGuess, step: BlockStep) -> Tensor:
        inside = guess.within(step.first, step.last)
        best = best_of(-guess.entropy_Q, inside, 1)
        return best | (inside & (guess.entropy_Q < self.threshold))
