"""The memory of heads while serving: the features of each row, and the carries of one round.

Letters: B rows, D hidden width, K draft vocabulary, M new nodes, N nodes, O output width, P path, X
any axes, Y carry, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, StepState
from specctl.drafters.nets.routed import ServedHead, read_head, served_head


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
        self.state_ZD = torch.zeros(num_slots, width, dtype=like.dtype, device=like.device)
        self.is_known = [False] * num_slots

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.is_known[slot] = len(tokens) > 1
        self.state_ZD[slot] = 0.0
        if self.is_known[slot]:
            self.state_ZD[slot] = taps[self.tap][-1].to(self.state_ZD.dtype)

    def observe(self, outcome: Outcome) -> None:
        taps_BPD = outcome.taps[self.tap]
        at_B = torch.tensor(outcome.num_accepted, device=taps_BPD.device)
        row_B = torch.arange(len(at_B), device=taps_BPD.device)
        self.state_ZD[outcome.view.slot_B] = taps_BPD[row_B, at_B].to(self.state_ZD.dtype)
        for slot in outcome.view.slots:
            self.is_known[slot] = True

    def at(self, view: RoundView) -> Tensor:
        return self.state_ZD[view.slot_B]


class Heads(Protocol):
    """What the state needs of its drafter (see `head_drafter`)."""

    options: Any

    @property
    def num_stages(self) -> int: ...

    def begin(self, state_XD: Tensor) -> Tensor: ...

    def read(self, depth: int, carry_XY: Tensor, ids_X: Tensor) -> Tensor: ...

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor: ...

    def head_weights(self) -> list[Tensor]: ...

    def version(self) -> int: ...


class HeadState(StepState):
    """Features of the rows, and LM heads prepared for serving whenever a weight has changed."""

    def __init__(self, drafter: Heads, features: DraftFeatures) -> None:
        self.drafter, self.features = drafter, features
        self._version, self._packed = drafter.version(), self._pack_heads()

    def _pack_heads(self) -> list[ServedHead]:
        options = self.drafter.options
        return [served_head(weight, options) for weight in self.drafter.head_weights()]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        if self._version != self.drafter.version():
            self._version, self._packed = self.drafter.version(), self._pack_heads()
        self.features.start(slot, tokens, taps)

    def observe(self, outcome: Outcome) -> None:
        self.features.observe(outcome)


class GroundedState(HeadState):
    """Heads that read the tokens drafted before them: each node's carry comes of its parent's."""

    def __init__(self, drafter: Heads, features: DraftFeatures) -> None:
        super().__init__(drafter, features)
        self._carries: list[Tensor] = []
        self._depths: list[Tensor] = []
        self._ready_BO: Tensor | None = None

    def root(self, view: RoundView) -> Tensor:
        carry_BY = self.drafter.begin(self.features.at(view))
        carry_B1Y = self.drafter.read(0, carry_BY, view.root_B)[:, None]
        self._carries, self._depths = [carry_B1Y], [torch.zeros_like(view.root_B[:, None])]
        return self._head_logits(0, carry_B1Y)[:, 0]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        assert self._carries, "root() begins a round"
        every_BNY, at_BM = torch.cat(self._carries, dim=1), parent_BM + 1
        depth_BM = torch.cat(self._depths, dim=1).gather(1, at_BM) + 1
        before_BMY = every_BNY.gather(1, at_BM[:, :, None].expand(-1, -1, every_BNY.shape[-1]))
        carry_BMY = logits_BMK = None
        for depth in self._present(depth_BM):
            new_BMY = self.drafter.read(depth, before_BMY, token_BM)
            new_BMK = self._head_logits(depth, new_BMY)
            if carry_BMY is None or logits_BMK is None:
                carry_BMY, logits_BMK = new_BMY, new_BMK
            else:
                is_here_BM1 = (depth_BM == depth)[:, :, None]
                carry_BMY = torch.where(is_here_BM1, new_BMY, carry_BMY)
                logits_BMK = torch.where(is_here_BM1, new_BMK, logits_BMK)
        assert carry_BMY is not None
        assert logits_BMK is not None
        self._carries.append(carry_BMY)
        self._depths.append(depth_BM)
        return logits_BMK

    def _present(self, depth_BM: Tensor) -> list[int]:
        """Depths of the nodes, one after another. Where all of them are treated alike nothing is
        read; else the host reads the depths, as weights cannot be chosen on the device."""
        if self.drafter.num_stages <= 2:
            return [1]
        found: list[int] = torch.unique(depth_BM).tolist()
        return found

    def _head_logits(self, depth: int, carry_BMY: Tensor) -> Tensor:
        ready_BMO = self.drafter.ready(depth, carry_BMY)
        self._ready_BO = ready_BMO[:, -1]
        return read_head(ready_BMO, self._packed[min(depth, len(self._packed) - 1)])

    def hidden(self) -> Tensor:
        assert self._ready_BO is not None, "root() begins a round"
        return self._ready_BO
