"""Window-Diffusion (https://arxiv.org/abs/2601.20332): a window of masked positions slides right.

Of the masked positions the first `active` are computed in every pass, and only they are guessed.
The `buffer` behind them is computed once a phase of `refresh` passes and taken from the cache in
between; all that lies behind is left out, nothing attends to it. Decoded tokens are computed in the
phase in which they were decoded, and cached after it. With a window over the whole answer and
`refresh` 1 it is the plain computation.
Letters: L positions, Q picked rows, T fed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.diffusion.canvas import Canvas, CanvasGuess
from specctl.diffusion.passes import Passes
from specctl.diffusion.reuse.base import CanvasReader
from specctl.diffusion.reuse.key_store import KeyStore


class WindowReader(CanvasReader):
    """Holds the window of the phase: the masked positions that were in it when it began."""

    mark = "window"

    def __init__(self, passes: Passes, length: int, active: int, buffer: int, refresh: int) -> None:
        super().__init__(passes)
        self.active, self.size, self.refresh = active, active + buffer, refresh
        self.store, self.made = KeyStore(length), 0
        self.window_T = torch.zeros(0, dtype=torch.long)

    def guess(self, canvas: Canvas, place_Q: Tensor) -> CanvasGuess:
        masked_T = canvas.masked(canvas.start, canvas.length)  # a prompt may hold the mask's token
        inside_T = masked_T[torch.isin(masked_T, self.window_T)]
        active_T = masked_T[: self.active]
        is_new = self.made % self.refresh == 0 or not torch.isin(active_T, inside_T).all()
        fed_L = torch.zeros(canvas.length, dtype=torch.bool)
        if is_new:  # the phase begins early where its window has become too short
            self.made = 0
            self.window_T = masked_T[: self.size]
            seen_L = canvas.ids_L != canvas.mask_id
            seen_L[: canvas.start] = True
            seen_L[self.window_T] = True
            self.store.seen_L = seen_L.nonzero()[:, 0]
            fed_L |= seen_L
        else:
            fed_L[self.window_T[canvas.ids_L[self.window_T] != canvas.mask_id]] = True
            fed_L[active_T] = True
        shown_Q = place_Q[torch.isin(place_Q, active_T)]
        fed_L[self.passes.model.source(shown_Q)] = True
        self.made += 1
        self.store.fed_T = fed_L.nonzero()[:, 0]
        return self.passes.part(canvas, self.store.fed_T, self.store, shown_Q)
