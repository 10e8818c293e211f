"""DynamicTree: a context-dependent tree by drafter confidence (EAGLE-2, arXiv 2406.16858).

Level by level the `beam` best nodes are expanded, each proposes its `beam` best children; a
node's score is the sum of log q on its path; after the last level the `nodes` best of everything
scored are kept. Scores fall along a path, so the kept set is a connected tree. Nodes are top-k
choices, never samples: kind POINT under every sampling setting.

Letters: B rows, F frontier, C candidates of all levels, N kept nodes, K draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafters.parts.base import StepState
from specctl.drafters.parts.tree import DraftTree, NodeKind, empty_tree
from specctl.runtime.policies.base import Growth


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """`nodes` kept of a beam search `length` levels deep and `beam` wide."""

    length: int = 5
    nodes: int = 16
    beam: int = 4

    @property
    def depth(self) -> int:
        return self.length

    @property
    def is_chain(self) -> bool:
        return False

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.POINT

    def grow(self, growth: Growth) -> DraftTree:
        depth = min(growth.budget.depth, self.length)
        if depth <= 0 or growth.budget.nodes <= 0:
            return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        assert isinstance(growth.state, StepState)
        first_BK = growth.state.root(growth.view).float().log_softmax(-1)
        pool = _Pool.of(first_BK, min(self.beam, first_BK.shape[-1]))
        num_expanded = 0
        for _ in range(depth - 1):
            parent_BF = pool.expansion_parent()
            logits_BFK = growth.state.expand(growth.target_ids(pool.frontier_row()), parent_BF)
            pool.grow(logits_BFK.float().log_softmax(-1), num_expanded)
            num_expanded += parent_BF.shape[1]
        return pool.tree(growth, min(self.nodes, growth.budget.nodes), depth)


class _Pool:
    """All scored candidates of one growth and the frontier chosen among the newest."""

    def __init__(self, row_BC: Tensor, score_BC: Tensor, beam: int) -> None:
        self.row_BC, self.score_BC, self.beam = row_BC, score_BC, beam
        self.parent_BC = torch.full_like(row_BC, -1)
        self.expanded_BC = torch.full_like(row_BC, -1)
        self.rank_BC = torch.arange(row_BC.shape[1], device=row_BC.device).expand_as(row_BC)
        self.frontier_BF = self.rank_BC

    @classmethod
    def of(cls, first_BK: Tensor, beam: int) -> _Pool:
        best = first_BK.topk(beam, dim=-1)
        return cls(best.indices, best.values, beam)

    def frontier_row(self) -> Tensor:
        return self.row_BC.gather(1, self.frontier_BF)

    def expansion_parent(self) -> Tensor:
        """Expansion index of each frontier node's parent, -1 = the root."""
        parent_BF = self.parent_BC.gather(1, self.frontier_BF)
        index_BF = self.expanded_BC.gather(1, parent_BF.clamp(min=0))
        return torch.where(parent_BF >= 0, index_BF, parent_BF)

    def grow(self, logp_BFK: Tensor, first_expansion: int) -> None:
        """Score the children of the frontier, which becomes expanded, and choose the next one."""
        B, F, _ = logp_BFK.shape
        at_F = torch.arange(first_expansion, first_expansion + F, device=logp_BFK.device)
        self.expanded_BC = self.expanded_BC.scatter(1, self.frontier_BF, at_F.expand(B, F))
        best = logp_BFK.topk(self.beam, dim=-1)
        base_BF1 = self.score_BC.gather(1, self.frontier_BF)[:, :, None]
        score_BC = (best.values + base_BF1).reshape(B, F * self.beam)
        offset = self.row_BC.shape[1]
        rank_C = torch.arange(self.beam, device=logp_BFK.device).repeat(F)
        self.row_BC = torch.cat([self.row_BC, best.indices.reshape(B, -1)], 1)
        self.parent_BC = torch.cat(
            [self.parent_BC, self.frontier_BF.repeat_interleave(self.beam, 1)], 1
        )
        self.rank_BC = torch.cat([self.rank_BC, rank_C.expand(B, -1)], 1)
        self.expanded_BC = torch.cat([self.expanded_BC, torch.full_like(score_BC, -1).long()], 1)
        self.score_BC = torch.cat([self.score_BC, score_BC], 1)
        width = min(self.beam, score_BC.shape[1])
        self.frontier_BF = score_BC.topk(width, dim=-1).indices.sort(-1).values + offset

    def tree(self, growth: Growth, nodes: int, depth: int) -> DraftTree:
        """The best nodes in pool order (parents first), renumbered."""
        B, C = self.row_BC.shape
        nodes = min(nodes, C)
        keep_BN = self.score_BC.topk(nodes, dim=-1).indices.sort(-1).values
        new_BC = torch.full((B, C), -1, dtype=torch.long, device=keep_BN.device)
        order_BN = torch.arange(nodes, device=keep_BN.device).expand(B, nodes)
        new_BC = new_BC.scatter(1, keep_BN, order_BN)
        parent_BN = self.parent_BC.gather(1, keep_BN)
        parent_new_BN = torch.where(
            parent_BN >= 0, new_BC.gather(1, parent_BN.clamp(min=0)), parent_BN
        )
        orphan_BN = (parent_BN >= 0) & (parent_new_BN < 0)  # ties only: a parent scored equal
        return DraftTree(
            growth.target_ids(self.row_BC.gather(1, keep_BN)),
            parent_new_BN,
            self.rank_BC.gather(1, keep_BN),
            ~orphan_BN,
            NodeKind.POINT,
            depth,
            estimate_BN=self.score_BC.gather(1, keep_BN).exp(),
            expanded_BN=self.expanded_BC.gather(1, keep_BN),
        )
