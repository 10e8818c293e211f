"""Cascaded decoding of a block: each slot's few best tokens, then the best chain of these (arXiv
2006.01112, at order one).

A block whose correction looks one token back is a Markov chain: p(x) = prod_k p_k(x_k | x_k-1).
Order zero: the C likeliest tokens of every slot by the block alone. Order one: log p_k of each
candidate behind each candidate of the slot before, of all slots in one product, and from the last
slot to the first how good the best continuation of a candidate is (max-product),

    after_k(i) = max_j log p_k+1(j | i) + after_k+1(j),    of the last slot 0

A token scores log p_k(j | i) + after_k(j): taking the best of every slot gives the likeliest chain
of candidates, and what is drawn is verified by these scores. The paper's models are trained with
cut contexts of several lengths, and prune once an order; a correction has one order.
Letters: C candidates, D hidden width, K draft vocabulary, M new nodes, O output width, P path, X
any axes, Y carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.drafters.corrections.correction import Correction, FilledBlock, at_depth
from specctl.drafters.corrections.selector import BestTokens, spread
from specctl.drafters.losses.teacher import wide


@dataclass(frozen=True, slots=True)
class CascadedBlock:
    """What the inner correction shares; draft rows [X, P, C] of the candidates, and how good the
    best continuation behind each is; rows of the draft vocabulary."""

    inner: Any
    rows_XPC: Tensor
    after_XPC: Tensor
    num_rows: int


class CascadedCorrection(Correction):
    """Scores by an inner correction of first order and by what comes behind."""

    first_order = True

    def __init__(self, inner: Correction, candidates: int, ids_K: Tensor | None) -> None:
        assert inner.first_order, "a chain whose scores depend on more than the newest token"
        self.inner, self.candidates, self.ids_K = inner, candidates, ids_K

    def start(self, block: FilledBlock) -> tuple[CascadedBlock, Tensor]:
        shared, carry_X1Y = self.inner.start(block)
        rows_XPC = BestTokens.of(wide(block.base), self.candidates).rows
        after_XPC = self._after(shared, carry_X1Y, rows_XPC)
        return CascadedBlock(shared, rows_XPC, after_XPC, block.base.shape[-1]), carry_X1Y

    def _after(self, shared: Any, carry_X1Y: Tensor, rows_XPC: Tensor) -> Tensor:
        """[X, P, C]: the best log-probability of all slots behind each candidate."""
        X, P, C = rows_XPC.shape
        after_XC = torch.zeros(X, C, device=rows_XPC.device)
        found = [after_XC]
        if P > 1:
            links_XPCC = self._links(shared, carry_X1Y, rows_XPC)
            for slot in reversed(range(P - 1)):
                after_XC = (links_XPCC[:, slot] + after_XC[:, None]).amax(-1)
                found.append(after_XC)
        return torch.stack(found[::-1], dim=1)

    def _links(self, shared: Any, carry_X1Y: Tensor, rows_XPC: Tensor) -> Tensor:
        """[X, P - 1, C, C]: log-probability of each candidate (last axis) behind each one of the
        slot before."""
        X, P, C = rows_XPC.shape
        before_XM = rows_XPC[:, :-1].flatten(1)
        ids_XM = before_XM if self.ids_K is None else self.ids_K[before_XM]
        depth_M = torch.arange(1, P, device=rows_XPC.device).repeat_interleave(C)
        depth_XM = depth_M.expand(X, -1)
        carry_XMY = carry_X1Y.expand(-1, ids_XM.shape[1], -1)
        read_XMY = self.inner.read(shared, depth_XM, carry_XMY, ids_XM)
        logp_XMK = wide(self.inner.scores(shared, depth_XM, read_XMY)).log_softmax(-1)
        rows_XMC = rows_XPC[:, 1:].repeat_interleave(C, dim=1)
        return logp_XMK.gather(-1, rows_XMC).view(X, P - 1, C, C)

    def read(
        self, shared: CascadedBlock, depth_XM: Tensor, carry_XMY: Tensor, ids_XM: Tensor
    ) -> Tensor:
        return self.inner.read(shared.inner, depth_XM, carry_XMY, ids_XM)

    def scores(self, shared: CascadedBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor:
        logits_XMK = self.inner.scores(shared.inner, depth_XM, carry_XMY)
        rows_XMC = at_depth(shared.rows_XPC, depth_XM)
        logp_XMC = wide(logits_XMK).log_softmax(-1).gather(-1, rows_XMC)
        return spread(logp_XMC + at_depth(shared.after_XPC, depth_XM), rows_XMC, shared.num_rows)

    def shown(self, shared: CascadedBlock, depth_XM: Tensor, carry_XMY: Tensor) -> Tensor | None:
        return self.inner.shown(shared.inner, depth_XM, carry_XMY)
