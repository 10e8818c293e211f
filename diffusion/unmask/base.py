"""Unmask: decides after every pass which of the guessed tokens stay. Letters: Q picked rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from specctl.diffusion.canvas import CanvasGuess


@dataclass(frozen=True, slots=True)
class BlockStep:
    """Where decoding stands: the block [first, last), how many passes it has had, and how many
    tokens a static schedule keeps in this one."""

    first: int
    last: int
    step: int
    count: int


class Unmask(ABC):
    """One way. `mark` says what of the text is approximate (None: it is the plain schedule);
    `is_beyond`: it also keeps tokens of later blocks, and must see guesses of them."""

    mark: str | None = None
    is_beyond: bool = False

    @abstractmethod
    def keep(self, guess: CanvasGuess, step: BlockStep) -> Tensor:
        """bool [Q], at least one of the block."""


def best_of(score_Q: Tensor, allowed_Q: Tensor, count: int) -> Tensor:
    """bool [Q]: the `count` highest scores of those allowed; of equals the first counts."""
    kept = score_Q.new_zeros(score_Q.shape).bool()
    ranked = score_Q.masked_fill(~allowed_Q, -float("inf")).sort(descending=True, stable=True)[1]
    kept[ranked[: min(count, int(allowed_Q.sum()))]] = True
    return kept
