"""CanvasReader: how a pass over a canvas is made. Letters: Q picked rows."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from specctl.diffusion.canvas import Canvas, CanvasGuess
from specctl.diffusion.passes import Passes


class CanvasReader(ABC):
    """One way, of one request. `mark` says what of the text is approximate (None: nothing)."""

    mark: str | None = None

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    @abstractmethod
    def guess(self, canvas: Canvas, place_Q: Tensor) -> CanvasGuess:
        """What a pass predicts at these masked positions, or at the first of them."""


class WholeReader(CanvasReader):
    """Every pass computes the whole canvas."""

    def guess(self, canvas: Canvas, place_Q: Tensor) -> CanvasGuess:
        return self.passes.guesses([canvas], [place_Q])[0]
