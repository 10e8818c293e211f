"""StrideState: how a drafter serves that says several tokens per pass.

The last `stride` rows of a text, true or drafted, are a block: they look at everything up to its
end and say the next `stride` tokens, each row one. A node at a depth that is a multiple of the
stride ends a block; only there the layer runs. Nodes between say what their block said, whichever
tokens were taken from it. As the layer is the only one, keys and values of a row follow from the
row alone, so every node leaves its own once, whatever block it ends up in.
Letters: B rows, T true rows, M nodes, J = stride, D width, O = J D, E head width, K draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, Space
from specctl.drafters.nets.stride_net import StrideNet
from specctl.drafters.states.feature_state import FeatureState, Fed
from specctl.drafters.states.tree_layout import Place
from specctl.models.kernels import Weight, can_pack, linear, pack


class StrideServing(Protocol):
    """What the state needs of its drafter."""

    @property
    def net(self) -> StrideNet: ...

    @property
    def tap(self) -> int: ...

    def embed(self, ids_X: Tensor) -> Tensor: ...

    def head_weight(self) -> Tensor: ...

    def version(self) -> int: ...


class StrideState(FeatureState):
    """Memory of one engine: per slot the recurrence behind the newest true row and the last
    `stride` rows; of the nodes of a round the same, what their block says, and their depth."""

    def __init__(self, drafter: StrideServing, space: Space) -> None:
        self.drafter, self.net = drafter, drafter.net
        net, like = self.net, self.net.fc.weight
        width = net.shape.hidden_size
        self.memory_SM = like.new_zeros(space.num_slots, net.memory_width)
        self.tail_SO = like.new_zeros(space.num_slots, net.stride * width)
        self._memories: list[Tensor] = []
        self._tails: list[Tensor] = []
        self._blocks: list[Tensor] = []
        self._depths: list[Tensor] = []
        super().__init__(net.shape, 1, like, space)

    def weights_version(self) -> int:
        return self.drafter.version()

    def fuse_weights(self) -> None:
        weight = self.drafter.head_weight()
        self._head: Weight = pack(weight) if can_pack(weight) else weight.detach()

    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.drafter.tap].to(self.dtype)

    # -- true rows ------------------------------------------------------------------------------

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._clear(slot)

    def observe(self, outcome: Outcome) -> None:
        unread = [slot for slot in outcome.view.slots if self.num_rows[slot] == 0]
        super().observe(outcome)
        for slot in unread:  # a row without features is no part of the text
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        self.memory_SM[slot] = 0.0
        self.tail_SO[slot] = 0.0

    @torch.no_grad()
    def fill(self, fed: Fed) -> None:
        slot_B = self.kv.aim.slot_B1[:, 0]
        embedding_BTD = self.drafter.embed(fed.ids_BT)
        x_BTD, memory_BM = self.net.onward(
            embedding_BTD, fed.state_BTD, self.memory_SM[slot_B], fed.counts
        )
        self._write(x_BTD, fed.turn_BT2E)
        D = x_BTD.shape[-1]
        rows_BUD = torch.cat([self.tail_SO[slot_B].view(len(slot_B), -1, D), x_BTD], dim=1)
        at_J = torch.arange(self.net.stride, device=x_BTD.device)
        at_BJ = torch.tensor(fed.counts, device=x_BTD.device)[:, None] + at_J
        tail_BJD = rows_BUD.gather(1, at_BJ[:, :, None].expand(-1, -1, D))
        self.memory_SM[slot_B], self.tail_SO[slot_B] = memory_BM, tail_BJD.flatten(1)

    @torch.no_grad()
    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        self.fill(fed)
        slot_B = self.kv.aim.slot_B1[:, 0]
        tail_B1O = self.tail_SO[slot_B][:, None]
        mask = None
        if min(fed.counts) < max(fed.counts) or int(kept_B.min()) < int(kept_B.max()):
            at_L = torch.arange(self.kv.aim.span, device=kept_B.device)
            mask = (at_L < kept_B[:, None])[:, None, None]
        self._memories, self._tails = [self.memory_SM[slot_B][:, None]], [tail_B1O]
        self._depths = [torch.zeros_like(kept_B[:, None])]
        self._blocks = [self._block(tail_B1O, kept_B[:, None] - 1, mask)]
        return self._said(self._blocks[0], self._depths[0])

    # -- nodes ----------------------------------------------------------------------------------

    @torch.no_grad()
    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        memory_BMM, tail_BMO, block_BMO = (
            self.of_parents(stored, parent_BM, place)
            for stored in (self._memories, self._tails, self._blocks)
        )
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        embedding_BMD = self.drafter.embed(token_BM)
        state_BMD = self._taken(block_BMO, depth_BM - 1)
        B, M, D = state_BMD.shape
        x_N1D, memory_NM = self.net.onward(
            embedding_BMD.view(B * M, 1, D),
            state_BMD.view(B * M, 1, D),
            memory_BMM.flatten(0, 1),
            (1,) * (B * M),
        )
        x_BMD = x_N1D.view(B, M, D)
        self._write(x_BMD, self._turn_P2E[place.position_BM])
        tail_BMO = torch.cat([tail_BMO[..., D:], x_BMD], dim=-1)
        is_end_BM1 = (depth_BM % self.net.stride == 0)[:, :, None]
        if bool(is_end_BM1.any()):
            new_BMO = self._block(tail_BMO, place.position_BM, place.mask)
            block_BMO = torch.where(is_end_BM1, new_BMO, block_BMO)
        self._memories.append(memory_NM.view(B, M, -1))
        self._tails.append(tail_BMO)
        self._blocks.append(block_BMO)
        self._depths.append(depth_BM)
        return self._said(block_BMO, depth_BM)

    def _write(self, x_BTD: Tensor, turn_BT2E: Tensor) -> None:
        self.kv.update(0, *self.net.key_value(x_BTD, turn_BT2E))

    def _block(self, tail_BMO: Tensor, position_BM: Tensor, mask: Tensor | None) -> Tensor:
        """[B, M, O]: what blocks that end there say, one state per row."""
        B, M, _ = tail_BMO.shape
        J, D = self.net.stride, self.shape.hidden_size
        back_J = torch.arange(1 - J, 1, device=position_BM.device)
        position_BN = (position_BM[:, :, None] + back_J).clamp(min=0).view(B, M * J)
        if mask is not None:
            mask = mask.repeat_interleave(J, dim=2)
        x_BND = tail_BMO.view(B, M * J, D)
        turn_BN2E = self._turn_P2E[position_BN]
        return self.net.look(x_BND, turn_BN2E, [self.kv.read(0)], mask).view(B, M, J * D)

    def _taken(self, block_BMO: Tensor, depth_BM: Tensor) -> Tensor:
        """[B, M, D]: the state of that depth in each block."""
        block_BMJD = block_BMO.view(*depth_BM.shape, self.net.stride, -1)
        at_BM11 = (depth_BM % self.net.stride)[:, :, None, None]
        return block_BMJD.gather(2, at_BM11.expand(-1, -1, 1, block_BMJD.shape[-1]))[:, :, 0]

    def _said(self, block_BMO: Tensor, depth_BM: Tensor) -> Tensor:
        self._states.append(self._taken(block_BMO, depth_BM))
        return linear(self._states[-1], self._head)
