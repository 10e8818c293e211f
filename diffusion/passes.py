"""Passes of the model over a canvas, counted: how often it ran, and over how many positions.

Letters: B rows, D hidden width, L positions, Q picked rows, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.diffusion.canvas import Canvas, CanvasGuess
from specctl.diffusion.model import KeptKeys, MaskedLM


@dataclass(slots=True)
class Passes:
    """Runs the model. `count` forwards (a batch of drafts is one), `positions` computed in them.
    One writer: itself."""

    model: MaskedLM
    temperature: float = 0.0
    count: int = 0
    positions: int = 0
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.model.model.embed_tokens.weight.device

    def guesses(self, canvases: Sequence[Canvas], places: Sequence[Tensor]) -> list[CanvasGuess]:
        """One pass over canvases of the same length, whole, and what it predicts at these masked
        positions of each."""
        ids_BL = torch.stack([canvas.ids_L for canvas in canvases]).to(self.device)
        state_BLD = self.model(ids_BL)
        self._counted(ids_BL)
        pairs = zip(canvases, places, state_BLD, strict=True)
        return [self._drawn(c, place, state[self._at(place)]) for c, place, state in pairs]

    def part(self, canvas: Canvas, fed_T: Tensor, kept: KeptKeys, place_Q: Tensor) -> CanvasGuess:
        """One pass over some positions, ascending, which attend to what is kept, too."""
        ids_BT = canvas.ids_L[fed_T][None].to(self.device)
        state_TD = self.model(ids_BT, fed_T.to(self.device), kept)[0]
        self._counted(ids_BT)
        index_Q = torch.searchsorted(fed_T, self.model.source(place_Q))
        return self._drawn(canvas, place_Q, state_TD[index_Q.to(self.device)])

    def _at(self, place_Q: Tensor) -> Tensor:
        return self.model.source(place_Q).to(self.device)

    def _drawn(self, canvas: Canvas, place_Q: Tensor, state_QD: Tensor) -> CanvasGuess:
        logits_QV = self.model.logits(state_QD).cpu()
        return CanvasGuess.drawn(canvas, place_Q, logits_QV, self.temperature)

    def _counted(self, ids_BT: Tensor) -> None:
        self.count += 1
        self.positions += ids_BT.numel()
