"""The plain schedule: the most confident tokens of the block stay, the same number in every pass.

LLaDA's low-confidence remasking within semi-autoregressive blocks
(https://arxiv.org/abs/2502.09992): every masked token of the block is guessed, all but the most
confident are masked again.
Letters: Q picked rows.
"""

from __future__ import annotations

from torch import Tensor

from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.unmask.base import BlockStep, Unmask, best_of


class StaticUnmask(Unmask):
    """As many as the schedule says."""

    def keep(self, guess: CanvasGuess, step: BlockStep) -> Tensor:
        return best_of(guess.confidence_Q, guess.within(step.first, step.last), step.count)


def counts(length: int, steps: int) -> list[int]:
    """How many tokens each pass over a block keeps; the first passes keep the remainder."""
    steps = min(steps, length)
    each, more = divmod(length, steps)
    return [each + (index < more) for index in range(steps)]
