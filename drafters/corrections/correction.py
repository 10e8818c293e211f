"""Correction: what puts the slots of a block in the light of the tokens drafted before them.

A block predicts all its tokens at once: U_k = LM head of h_k, the state of slot k. A correction
reads the tokens from left to right, the root first, into a *carry*, and scores the slot behind the
newest one from h_k, U_k and the carry. The block is one pass, U is computed once a round, and a
node costs what `scores` costs. Training is the same walk along the tokens of the text (`forced`).
Rows X are the rows of a round or the blocks of a training batch; the nodes of one call may stand at
different depths: depth d reads the token at slot d (0 = root) and scores slot d.
Letters: A anchors, B rows, C candidates, D hidden width, K draft vocabulary, M new nodes, O output
width, P path, X any axes, Y carry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.models.kernels import linear


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """One pass of the layers: the states of the slots that predict [X, P, D], and U [X, P, K]
    (None: nothing that is wanted needs it). Of the token before the root its id and its row of
    injected features; of the root's own slot its state, where that predicts nothing and a
    correction reads it."""

    states_XPD: Tensor
    base_XPK: Tensor | None = None
    before_X: Tensor | None = None
    before_XD: Tensor | None = None
    root_XD: Tensor | None = None

    @property
    def base(self) -> Tensor:
        """U, where it must be there."""
        assert self.base_XPK is not None, "this correction scores by the block's own logits"
        return self.base_XPK


def at_depth(values_XPO: Tensor, depth_XM: Tensor) -> Tensor:
    """[X, M, ...]: of every slot's values those of each node's slot."""
    index = depth_XM.reshape(*depth_XM.shape, *(1,) * (values_XPO.dim() - 2))
    return values_XPO.gather(1, index.expand(-1, -1, *values_XPO.shape[2:]))


class Correction(ABC):
    """A view of a drafter's weights: made when it is wanted, it keeps nothing. `first_order`: the
    scores depend on the newest token and its depth alone, so that all steps of a known text can be
    taken at once."""

    first_order: bool

    @abstractmethod
    def start(self, block: FilledBlock) -> tuple[Any, Tensor]:
        """What all nodes of a round share, and the carry [X, 1, Y] that has read nothing."""

    @abstractmethod
    def read(self, shared: Any, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor) -> Tensor:
        """[X, M, Y]: the parents' carries after the nodes' own tokens (target ids)."""

    @abstractmethod
    def scores(self, shared: Any, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        """[X, M, K]: logits of the token behind each node; -inf for what is no candidate."""

    def shown(self, shared: Any, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor | None:
        """[X, M, O]: what learned stop rules see beside the slot's state, if anything."""
        return None

    def walked(self, shared: Any, carry_X1Y: Tensor, ids_XP: Tensor) -> Tensor:
        """[X, P, Y]: the carries along a text: the root and the tokens behind it."""
        depth_XP = torch.arange(ids_XP.shape[1], device=ids_XP.device).expand_as(ids_XP)
        if self.first_order:
            carry_XPY = carry_X1Y.expand(-1, ids_XP.shape[1], -1)
            return self.read(shared, depth_XP, carry_XPY, ids_XP)
        carries = list[Tensor]()
        for depth in range(ids_XP.shape[1]):
            at = slice(depth, depth + 1)
            carry_X1Y = self.read(shared, depth_XP[:, at], carry_X1Y, ids_XP[:, at])
            carries.append(carry_X1Y)
        return torch.cat(carries, dim=1)

    def forced(self, block: FilledBlock, ids_XP: Tensor) -> Tensor:
        """[X, P, K]: the scores along a text."""
        shared, carry_X1Y = self.start(block)
        depth_XP = torch.arange(ids_XP.shape[1], device=ids_XP.device).expand_as(ids_XP)
        return self.scores(shared, depth_XP, self.walked(shared, carry_X1Y, ids_XP))


class LowRankBias(Correction):
    """scores = U + up f: a bias of low rank over the whole draft vocabulary. With `up` zero the
    block is DFlash's."""

    def __init__(self, up_KO: Tensor, num_carried: int) -> None:
        self.up_KO, self.num_carried = up_KO, num_carried

    @abstractmethod
    def factor(self, block: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        """[X, M, O]: f."""

    def start(self, block: FilledBlock) -> tuple[FilledBlock, Tensor]:
        states_XPD = block.states_XPD
        return block, states_XPD.new_zeros(len(states_XPD), 1, self.num_carried)

    def scores(self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        base_XMK = at_depth(shared.base, depth_XM)
        if self.up_KO.shape[1] == 0:
            return base_XMK
        return base_XMK + linear(self.factor(shared, depth_XM, carry_XMY), self.up_KO)

    def shown(self, shared: FilledBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        return self.factor(shared, depth_XM, carry_XMY)

    def forced_factors(self, block: FilledBlock, ids_XP: Tensor) -> Tensor:
        """[X, P, O]: f along a text, for a loss that multiplies by `up` and the LM head at once."""
        shared, carry_X1Y = self.start(block)
        depth_XP = torch.arange(ids_XP.shape[1], device=ids_XP.device).expand_as(ids_XP)
        return self.factor(block, depth_XP, self.walked(shared, carry_X1Y, ids_XP))
