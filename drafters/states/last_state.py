"""LastState: per slot, the target's state at the newest position that it has read.

Letters: B rows, S slots, P path, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView


class DraftFeatures(Protocol):
    """What heads draft from: one state per row, made of what the target has read. `is_known[slot]`
    is False while it has read nothing."""

    is_known: list[bool]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None: ...

    def observe(self, outcome: Outcome) -> None: ...

    def at(self, view: RoundView) -> Tensor:
        """[B, D]: the state in front of each root."""


class LastState:
    """The tap itself. One writer: the DraftState that owns it."""

    def __init__(self, tap: int, num_slots: int, width: int, like: Tensor) -> None:
        self.tap = tap
        self.state_SD = torch.zeros(num_slots, width, dtype=like.dtype, device=like.device)
        self.is_known = [False] * num_slots

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.is_known[slot] = len(tokens) > 1
        self.state_SD[slot] = 0.0
        if self.is_known[slot]:
            self.state_SD[slot] = taps[self.tap][-1].to(self.state_SD.dtype)

    def observe(self, outcome: Outcome) -> None:
        taps_BPD = outcome.taps[self.tap]
        at_B = torch.tensor(outcome.num_accepted, device=taps_BPD.device)
        row_B = torch.arange(len(at_B), device=taps_BPD.device)
        self.state_SD[outcome.view.slot_B] = taps_BPD[row_B, at_B].to(self.state_SD.dtype)
        for slot in outcome.view.slots:
            self.is_known[slot] = True

    def at(self, view: RoundView) -> Tensor:
        return self.state_SD[view.slot_B]
