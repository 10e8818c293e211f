"""Explore, then exploit (ETE, https://arxiv.org/abs/2511.21103): uncertain tokens are kept early.

Passes are bounded from below by the information of the text over the information of a pass, and a
confident token carries little. So tokens above the threshold are kept wherever they stand, in later
blocks, too (exploit); and where a pass has none, the `explore` positions of the block with the
highest entropy are kept with its best one: what they settle makes others confident in the next
pass. Ours: when exploring begins (a pass without a confident token) and that it stays in the block.
With a threshold of 1 and nothing to explore a pass keeps one token, which is the plain schedule of
one token a pass.
Letters: Q picked rows.
"""

from __future__ import annotations

from torch import Tensor

from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.unmask.base import BlockStep, Unmask, best_of


class ExploreUnmask(Unmask):
    """Confident tokens of all blocks, or the least certain ones of this."""

    mark = "explore"
    is_beyond = True

    def __init__(self, threshold: float, explore: float) -> None:
        self.threshold, self.explore = threshold, int(explore)

    def keep(self, guess: CanvasGuess, step: BlockStep) -> Tensor:
        inside = guess.within(step.first, step.last)
        best = best_of(guess.confidence_Q, inside, 1)
        confident = guess.confidence_Q > self.threshold
        if confident.any():
            return best | confident
        return best | best_of(guess.entropy_Q, inside & ~best, self.explore)
