"""Beams: trees grown level by level from the best-scored nodes so far.

A node's score is the sum of log q on its path, a guess of the chance that the path is accepted.
Level by level the best nodes are expanded; after the last level the best of everything scored are
kept. Scores fall along a path, so the kept set is a connected tree. Nodes are top-k choices, never
samples: kind POINT under every sampling setting.
Letters: B rows, C candidates (of all levels), K draft vocabulary, M new nodes (frontier), N nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.runtime.policies.base import GrowRequest

Stop = Callable[["Pool"], Tensor]  # bool [B] after a level: is this enough for the row?


def grow_beam(
    growth: GrowRequest, beam: int, nodes: int, depth: int, stop: Stop | None = None
) -> DraftTree:
    """The `nodes` best of a beam search `depth` levels deep, `beam` wide, ended by `stop`."""
    nodes = min(growth.budget.nodes, nodes)
    pool = search_beam(growth, beam, depth, stop) if nodes > 0 else None
    if pool is None:
        return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
    return pool.tree(growth, nodes)


def search_beam(
    growth: GrowRequest, beam: int, depth: int, stop: Stop | None = None
) -> Pool | None:
    """All that a beam search has scored; None where no level may be drafted. A row that has enough
    scores nothing more, however deep the others go."""
    depth = min(growth.budget.depth, depth)
    if depth <= 0:
        return None
    first_BK = _log_q(growth.root())
    pool = Pool.of(first_BK, min(beam, first_BK.shape[-1]))
    enough_B = torch.zeros_like(growth.view.slot_B, dtype=torch.bool)
    while pool.num_levels < depth:
        if stop is not None:
            enough_B = enough_B | stop(pool)
            if bool(enough_B.all()):
                break
        parent_BM = pool.expansion_parent()
        logits_BMK = growth.expand(growth.target_ids(pool.frontier_row()), parent_BM)
        logq_BMK = _log_q(logits_BMK)
        if stop is not None:
            logq_BMK = logq_BMK.masked_fill(enough_B[:, None, None], -torch.inf)
        pool.grow(logq_BMK)
    return pool


def _log_q(logits: Tensor) -> Tensor:
    """log softmax; rows with nothing to draft stay -inf everywhere."""
    silent = logits.amax(-1, keepdim=True) == -torch.inf
    return logits.float().log_softmax(-1).masked_fill(silent, -torch.inf)


class Pool:
    """All scored candidates of one growth and the frontier chosen among the newest."""

    def __init__(self, row_BC: Tensor, score_BC: Tensor, beam: int) -> None:
        self.row_BC, self.score_BC, self.beam = row_BC, score_BC, beam
        self.num_levels, self.num_expanded = 1, 0
        self.parent_BC = torch.full_like(row_BC, -1)
        self.expanded_BC = torch.full_like(row_BC, -1)
        self.rank_BC = torch.arange(row_BC.shape[1], device=row_BC.device).expand_as(row_BC)
        self.frontier_BM = self.rank_BC

    @classmethod
    def of(cls, first_BK: Tensor, beam: int) -> Pool:
        best = first_BK.topk(beam, dim=-1)
        return cls(best.indices, best.values, beam)

    def frontier_row(self) -> Tensor:
        return self.row_BC.gather(1, self.frontier_BM)

    def expansion_parent(self) -> Tensor:
        """Expansion index of each frontier node's parent, -1 = the root."""
        parent_BM = self.parent_BC.gather(1, self.frontier_BM)
        index_BM = self.expanded_BC.gather(1, parent_BM.clamp(min=0))
        return torch.where(parent_BM >= 0, index_BM, parent_BM)

    def grow(self, logp_BMK: Tensor) -> None:
        """Score the children of the frontier, which becomes expanded, and choose the next one."""
        B, M, _ = logp_BMK.shape
        at_M = torch.arange(self.num_expanded, self.num_expanded + M, device=logp_BMK.device)
        self.num_levels, self.num_expanded = self.num_levels + 1, self.num_expanded + M
        self.expanded_BC = self.expanded_BC.scatter(1, self.frontier_BM, at_M.expand(B, M))
        best = logp_BMK.topk(self.beam, dim=-1)
        base_BM1 = self.score_BC.gather(1, self.frontier_BM)[:, :, None]
        score_BC = (best.values + base_BM1).reshape(B, M * self.beam)
        offset = self.row_BC.shape[1]
        rank_C = torch.arange(self.beam, device=logp_BMK.device).repeat(M)
        self.row_BC = torch.cat([self.row_BC, best.indices.reshape(B, -1)], 1)
        self.parent_BC = torch.cat(
            [self.parent_BC, self.frontier_BM.repeat_interleave(self.beam, 1)], 1
        )
        self.rank_BC = torch.cat([self.rank_BC, rank_C.expand(B, -1)], 1)
        self.expanded_BC = torch.cat([self.expanded_BC, torch.full_like(score_BC, -1).long()], 1)
        self.score_BC = torch.cat([self.score_BC, score_BC], 1)
        width = min(self.beam, score_BC.shape[1])
        self.frontier_BM = score_BC.topk(width, dim=-1).indices.sort(-1).values + offset

    def frontier_mass(self) -> Tensor:
        """[B]: summed path probabilities of the nodes to be expanded next."""
        return self.score_BC.gather(1, self.frontier_BM).exp().sum(1)

    def value(self, nodes: int) -> Tensor:
        """[B]: summed path probabilities of the `nodes` best, the expected accepted tokens."""
        return self.score_BC.topk(min(nodes, self.score_BC.shape[1])).values.exp().sum(1)

    def on_beams(self) -> Tensor:
        """Bool [B, C]: candidates on the path to a node of the last frontier."""
        on_BC = torch.zeros_like(self.row_BC, dtype=torch.bool)
        on_BC = on_BC.scatter(1, self.frontier_BM, torch.ones_like(self.frontier_BM).bool())
        for _ in range(self.num_levels - 1):
            parent_BC = torch.where(on_BC, self.parent_BC + 1, 0)  # 0: no candidate
            above_BC = torch.zeros_like(on_BC[:, :1]).expand(-1, on_BC.shape[1] + 1)
            above_BC = above_BC.scatter(1, parent_BC, torch.ones_like(on_BC))
            on_BC = on_BC | above_BC[:, 1:]
        return on_BC

    def tree(self, growth: GrowRequest, nodes: int, wanted_BC: Tensor | None = None) -> DraftTree:
        """The best nodes, or the best wanted ones, in pool order (parents first), renumbered."""
        B, C = self.row_BC.shape
        nodes = min(nodes, C)
        score_BC = self.score_BC
        if wanted_BC is not None:
            score_BC = score_BC.masked_fill(~wanted_BC, -torch.inf)
        keep_BN = score_BC.topk(nodes, dim=-1).indices.sort(-1).values
        new_BC = torch.full((B, C), -1, dtype=torch.long, device=keep_BN.device)
        order_BN = torch.arange(nodes, device=keep_BN.device).expand(B, nodes)
        new_BC = new_BC.scatter(1, keep_BN, order_BN)
        parent_BN = self.parent_BC.gather(1, keep_BN)
        parent_new_BN = torch.where(
            parent_BN >= 0, new_BC.gather(1, parent_BN.clamp(min=0)), parent_BN
        )
        orphan_BN = (parent_BN >= 0) & (parent_new_BN < 0)  # ties only: a parent scored equal
        score_BN = score_BC.gather(1, keep_BN)
        return DraftTree(
            growth.target_ids(self.row_BC.gather(1, keep_BN)),
            parent_new_BN,
            self.rank_BC.gather(1, keep_BN),
            ~orphan_BN & (score_BN > -torch.inf),
            NodeKind.POINT,
            self.num_levels,
            estimate_BN=score_BN.exp(),
            expanded_BN=self.expanded_BC.gather(1, keep_BN),
        )
