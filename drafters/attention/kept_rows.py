"""KeptRows: which true rows of a text a drafter with a window keeps, and where they lie.

A row that no later query can see need not be kept. The first `sink` rows stay where they are; when
the others have filled the cache, the newest of them move to the front of what is left, so that a
slot never holds more than `sink` + 2 `least` of them. Keys are rotated before they are stored, so a
row keeps its true position wherever it lies: entry i >= sink is the row of position
i + dropped[slot].
Letters: B rows, E head width, J key/value heads, L positions, T fed tokens, Z slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specctl.core.forward.masks import chain_mask
from specctl.core.kv_cache import SlotKV
from specctl.drafters.attention.seen import AttentionWindow


class KeptRows:
    """One writer: the state that owns it. `width` rows at most are written in one round."""

    def __init__(self, window: AttentionWindow, num_slots: int, width: int) -> None:
        self.window, self.dropped = window, [0] * num_slots
        self.least = max(window.size, width)

    @property
    def most(self) -> int:
        """True rows of a slot."""
        return self.window.sink + 2 * self.least

    def forget(self, slot: int) -> None:
        """A new text begins there."""
        self.dropped[slot] = 0

    def make_room(self, kv: SlotKV, slot: int, have: int, last: int) -> None:
        """Rows up to `last` are to be held, of which the first `have` are known: drop the oldest if
        they are too many."""
        sink, before = self.window.sink, self.dropped[slot]
        if last - before <= self.most:
            return
        dropped = self.dropped[slot] = last - sink - self.least
        count = have - sink - dropped  # known rows that stay; they lie behind where they go
        if count > 0:
            there, here = slice(sink, sink + count), slice(have - before - count, have - before)
            for stored in (*kv.key_ZJLE, *kv.value_ZJLE):
                stored[slot, :, there] = stored[slot, :, here]

    def runs(self, kv: SlotKV, slot: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The positions [start, stop) among first .. last - 1 whose rows are to be written, and
        where the first of each run goes. Rows before `first` are known."""
        self.make_room(kv, slot, first, last)
        sink, dropped = self.window.sink, self.dropped[slot]
        if dropped == 0:
            yield first, last, first
            return
        if first < min(last, sink):
            yield first, min(last, sink), first
        start = max(first, sink + dropped)
        if start < last:
            yield start, last, start - dropped

    def shift_B(self, slots: Sequence[int], device: torch.device) -> Tensor:
        """What is added to an entry of these rows to have its position."""
        return torch.tensor([self.dropped[slot] for slot in slots], device=device)

    def chain(self, start_B: Tensor, num_fed: int, span: int) -> Tensor:
        """[B, 1, T, L]: `chain_mask` within the window; all by entries, not positions."""
        return self.within(chain_mask(start_B, num_fed, span), start_B)

    def within(self, mask: Tensor, start_B: Tensor) -> Tensor:
        """[B, 1, T, L]: what queries behind one another from `start_B` on see through the window of
        what the mask shows them."""
        num_fed, span = mask.shape[2:]
        if span <= self.window.size:
            return mask
        query_BT = start_B[:, None] + torch.arange(num_fed, device=start_B.device)
        at_L = torch.arange(span, device=start_B.device)
        near_BTL = query_BT[:, :, None] - at_L < self.window.size
        return mask & (near_BTL | self.is_sink(span, start_B.device))[:, None]

    def is_sink(self, span: int, device: torch.device) -> Tensor:
        """[L]: the entries that are always seen."""
        return torch.arange(span, device=device) < self.window.sink
