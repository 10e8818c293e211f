"""RecurrentLmState: the memory of a draft model with recurrent layers, and its steps.

A recurrent state has no place for each token, so it stands behind the known tokens while a round
grows: every step feeds all nodes so far, each read on its own path
(`models.recurrent.state_forms`), and the accepted nodes move the state when the round is over.
Steps of a few tokens cost about as much as one: they read the same weights.
Letters: B rows, D hidden width, M new nodes, N nodes, P path, T fed tokens, X any axes, Z slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, Space
from specctl.core.forward.slot_state import StateKV
from specctl.drafters.states.lm_state import LmState, SpokenModel, _Missing
from specctl.drafters.states.tree_layout import TreeLayout, expansions

FILL_CHUNK = 64  # tokens read at once: the inputs of all of them wait until they are in the state


class RecurrentLmState(LmState):
    """Per slot: the draft's keys, values and states behind its first `num_cached` tokens."""

    is_recordable = False
    chunk = FILL_CHUNK
    kv: StateKV

    def __init__(self, drafter: SpokenModel, space: Space) -> None:
        super().__init__(drafter, space)
        self._token_BN = self._parent_BN = torch.empty(0, 0, dtype=torch.long)

    def _fill(self, slot: int, tokens: Sequence[int], begin: int, end: int) -> None:
        stands = self.kv.state.position(slot)
        super()._fill(slot, tokens, begin if begin == stands else 0, end)

    def _read_run(self, slot_B: Tensor, counts: Sequence[int]) -> None:
        at_P = torch.arange(max(counts), device=slot_B.device)
        count_B1 = torch.tensor(counts, device=slot_B.device)[:, None]
        self.kv.advance(slot_B, torch.where(at_P < count_B1, at_P, -1))

    def root(self, view: RoundView) -> Tensor:
        stands_B = self.kv.state.position_Z[view.slot_B].tolist()
        for slot, tokens, stands in zip(view.slots, view.tokens, stands_B, strict=True):
            if 0 <= stands < self.num_cached[slot]:
                # Nodes that nobody kept, though they are true: they are read with the root.
                self.num_cached[slot] = stands
            elif stands != self.num_cached[slot]:
                # A round was given up, or another reading of the text is shorter: begin again.
                self._fill(slot, tokens, 0, len(tokens) - 1)
                self.num_cached[slot] = len(tokens) - 1
        return super().root(view)

    def _begin(self, view: RoundView, missing: _Missing) -> TreeLayout:
        self._token_BN = self._parent_BN = view.root_B.new_empty(len(view.slots), 0)
        return super()._begin(view, missing)

    def _read_nodes(self, token_BM: Tensor, parent_BM: Tensor, is_nested: bool = False) -> Tensor:
        assert self._growth is not None, "root() begins a round"
        view, kept_B, M = self._growth.view, self._growth.kept_B, token_BM.shape[1]
        self._token_BN = torch.cat([self._token_BN, token_BM], dim=1)
        self._parent_BN = torch.cat([self._parent_BN, parent_BM], dim=1)
        self._growth = TreeLayout(view, self.kv, self._kept, kept_B)
        place = self._growth.place(self._parent_BN, is_nested=True)
        masks = self._growth.masks(place, self.lm.windows)
        read_BNX: Tensor = self._read(self._token_BN, place.position_BM, masks)
        self._newest_BTD = self._newest_BTD[:, -M:]
        return self._head_logits(read_BNX[:, -M:])

    def observe(self, outcome: Outcome) -> None:
        growth, view = self._growth, outcome.view
        if growth is None:
            self._read_on(view)
            return
        self._growth = None
        stays = [0] * len(view.slots)
        if growth.num_nodes:
            path_BP = expansions(outcome, growth.num_nodes)
            stays = (path_BP >= 0).sum(1).tolist()
            if any(stays):
                self.kv.keep(view.slot_B, growth.kept_B, path_BP)
        for slot, kept, num_more in zip(view.slots, self._kept, stays, strict=True):
            self.num_cached[slot] = kept + num_more
