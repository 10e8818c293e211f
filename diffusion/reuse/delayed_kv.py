"""dKV-Cache-Decode (https://arxiv.org/abs/2505.15781): keys and values of decoded tokens are kept,
one pass after the token was decoded.

A pass computes the masked positions and the tokens that the pass before it decoded: only there has
the model read the token itself, so only then are its keys worth keeping. Everything older, the
prompt included, is taken from the cache, and computed anew every `refresh` passes. With `refresh` 1
nothing is ever taken from it: the plain computation.
Letters: L positions, Q picked rows, T fed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.diffusion.canvas import Canvas, CanvasGuess
from specctl.diffusion.passes import Passes
from specctl.diffusion.reuse.base import CanvasReader
from specctl.diffusion.reuse.key_store import KeyStore


class DelayedReader(CanvasReader):
    """Remembers what was masked when the last pass was made."""

    mark = "dkv-cache"

    def __init__(self, passes: Passes, length: int, refresh: int) -> None:
        super().__init__(passes)
        self.refresh, self.made = refresh, 0
        self.store = KeyStore(length, seen_L=torch.arange(length))
        self.was_masked_L = torch.zeros(length, dtype=torch.bool)

    def guess(self, canvas: Canvas, place_Q: Tensor) -> CanvasGuess:
        is_masked_L = canvas.ids_L == canvas.mask_id
        fed_L = is_masked_L | self.was_masked_L
        if self.made % self.refresh == 0:
            fed_L = torch.ones_like(fed_L)
        fed_L[self.passes.model.source(place_Q)] = True
        self.made, self.was_masked_L = self.made + 1, is_masked_L
        self.store.fed_T = fed_L.nonzero()[:, 0]
        return self.passes.part(canvas, self.store.fed_T, self.store, place_Q)
