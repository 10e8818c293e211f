"""BestNgrams: what a model found most probable after the last few tokens, in tables of fixed size.

Filled while the model is trained, read while it drafts: the longest context that is known decides,
shorter ones where it is not (back-off). A table is addressed by a hash of the context, so that it
is as large after a billion tokens as after none; a later context takes the place of an earlier one.
Letters: B rows, R flat rows, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specctl.drafters.losses.align import shifted

FACTOR = 0x5851F42D4C957F2D  # of the multiplicative hash, 64 bits and odd
WORD = 2**64 - 1
UNKNOWN = -1


class BestNgrams:
    """`tokens`: int32 [order, slots] on the CPU, row n for contexts of n + 1 tokens; `slots` is a
    power of two."""

    def __init__(self, order: int, slots: int) -> None:
        assert slots & (slots - 1) == 0, f"{slots} slots are no power of two"
        self.order, self.slots = order, slots
        self.tokens = torch.full((order, slots), UNKNOWN, dtype=torch.int32)

    @torch.no_grad()
    def learn(self, ids_BS: Tensor, document_BS: Tensor, best_BS: Tensor) -> None:
        """After position t of packed rows the model found `best[t]` most probable."""
        key_BS = torch.zeros_like(ids_BS)
        inside_BS = document_BS >= 0
        S = ids_BS.shape[1]
        for n in range(min(self.order, S)):
            first = S - n  # contexts of n + 1 tokens begin at 0 .. S - n - 1
            key_BS = (key_BS + shifted(ids_BS, n) + 1) * FACTOR
            inside_BS = inside_BS & (shifted(document_BS, n, UNKNOWN) == document_BS)
            ends = best_BS[:, n:][inside_BS[:, :first]]
            slot_R = ((key_BS >> 24) & (self.slots - 1))[:, :first][inside_BS[:, :first]]
            self.tokens[n][slot_R.cpu()] = ends.to("cpu", torch.int32)

    def best(self, text: Sequence[int]) -> int | None:
        """The token after a text; None where no context is known."""
        table: np.ndarray = self.tokens.numpy()
        for n in range(min(self.order, len(text)), 0, -1):
            key = 0
            for token in text[len(text) - n :]:
                key = ((key + token + 1) * FACTOR) & WORD
            found = int(table[n - 1, (key >> 24) & (self.slots - 1)])
            if found != UNKNOWN:
                return found
        return None
