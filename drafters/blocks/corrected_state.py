"""CorrectedState: the memory of a corrected block while serving. One pass and one product with the
LM head fill it at the root; each node reads its token into its parent's carry and is scored.
Letters: B rows, D hidden width, K draft vocabulary, M new nodes, N nodes, O output width, P path, X
any axes, Y carry, Z slots.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from specctl.core.drafter import RoundView
from specctl.drafters.corrections.correction import Correction, FilledBlock, at_depth
from specctl.drafters.nets.prefix import PrefixState
from specctl.drafters.nets.routed import ServedHead, read_head, served_head
from specctl.drafters.states.head_state import Heads, HeadState


class CorrectedHeads(Heads, Protocol):
    """What the state needs of its drafter besides its heads."""

    @property
    def correction(self) -> Correction: ...

    def base_head(self) -> Tensor: ...

    def slot_states(self, state_BY: Tensor) -> Tensor: ...


class CorrectedState(HeadState):
    """The block of this round, and every node's carry and depth."""

    drafter: CorrectedHeads

    def __init__(self, drafter: CorrectedHeads, features: PrefixState) -> None:
        super().__init__(drafter, features)
        self.rows = features
        self._carries: list[Tensor] = []
        self._depths: list[Tensor] = []
        self._block: FilledBlock | None = None
        self._shared: Any = None

    def _pack_heads(self) -> list[ServedHead]:
        return [served_head(self.drafter.base_head(), self.drafter.options)]

    @property
    def correction(self) -> Correction:
        return self.drafter.correction

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        self._block = self.filled(view)
        self._shared, carry_B1Y = self.correction.start(self._block)
        self._carries, self._depths = [], []
        root_B1 = view.root_B[:, None]
        return self._read(torch.zeros_like(root_B1), carry_B1Y, root_B1)[:, 0]

    def filled(self, view: RoundView) -> FilledBlock:
        """The block behind each root."""
        states_BPD = self.drafter.slot_states(self.features.at(view))
        row_BD = self.rows.state_ZD[view.slot_B]
        return FilledBlock(states_BPD, read_head(states_BPD, self._packed[0]), before_XD=row_BD)

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        assert self._carries, "root() begins a round"
        every_BNY, at_BM = torch.cat(self._carries, dim=1), parent_BM + 1
        depth_BM = torch.cat(self._depths, dim=1).gather(1, at_BM) + 1
        before_BMY = every_BNY.gather(1, at_BM[:, :, None].expand(-1, -1, every_BNY.shape[-1]))
        return self._read(depth_BM, before_BMY, token_BM)

    def _read(self, depth_BM: Tensor, before_BMY: Tensor, token_BM: Tensor) -> Tensor:
        """[B, M, K]; past the last slot, nodes are scored by it."""
        correction, slot_BM = self.correction, self._slots(depth_BM)
        carry_BMY = correction.read(self._shared, slot_BM, before_BMY, token_BM)
        self._carries.append(carry_BMY)
        self._depths.append(depth_BM)
        return correction.scores(self._shared, slot_BM, carry_BMY)

    def _slots(self, depth_BM: Tensor) -> Tensor:
        return depth_BM.clamp(max=self.block.states_XPD.shape[1] - 1)

    @property
    def block(self) -> FilledBlock:
        assert self._block is not None, "root() begins a round"
        return self._block

    @torch.no_grad()
    def hidden(self) -> Tensor:
        """[B, D + O]: of the newest node its slot's state, and what the correction makes of it."""
        depth_B1, carry_B1Y = self.newest()
        state_B1D = at_depth(self.block.states_XPD, depth_B1)
        shown_B1O = self.correction.shown(self._shared, depth_B1, carry_B1Y)
        parts = [state_B1D] if shown_B1O is None else [state_B1D, shown_B1O]
        return torch.cat(parts, dim=-1)[:, 0]

    def newest(self) -> tuple[Tensor, Tensor]:
        """[B, 1] and [B, 1, Y]: the slot and the carry of the newest node."""
        return self._slots(self._depths[-1][:, -1:]), self._carries[-1][:, -1:]
