"""KeyStore: keys and values of one canvas by layer and position. Letters: B rows, E head width,
J key/value heads, L positions, T fed tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class KeyStore:
    """What the fed tokens write and attend to. `fed_T`: where they stand; `seen_L`: the positions
    that are attended to. One writer: the reader that holds it, before each pass."""

    length: int
    fed_T: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    seen_L: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    _kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def joined(self, layer: int, key_BJTE: Tensor, value_BJTE: Tensor) -> tuple[Tensor, Tensor]:
        """Stores what was computed, and gives all that is seen."""
        if layer not in self._kept:
            rows, heads, _, width = key_BJTE.shape
            shape = rows, heads, self.length, width
            self._kept[layer] = key_BJTE.new_zeros(shape), value_BJTE.new_zeros(shape)
        key_BJLE, value_BJLE = self._kept[layer]
        key_BJLE[:, :, self.fed_T] = key_BJTE
        value_BJLE[:, :, self.fed_T] = value_BJTE
        return key_BJLE[:, :, self.seen_L], value_BJLE[:, :, self.seen_L]
