"""MergedBeams: the best whole drafts of a beam search, their common beginnings verified once.

Recurrent Drafter (arXiv 2403.09919, section 3.2) drafts `beam` candidates of `length` tokens by
ordinary beam search, then merges equal prefixes (dynamic tree attention): the target reads a tree
with the same paths and fewer tokens. A dynamic tree spends its nodes wherever q is large, this one
on whole candidates only.
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.tree import DraftTree, empty_tree
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.beam import search_beam


@dataclass(frozen=True, slots=True)
class MergedBeams(PointTree):
    """`beam` candidates of `length` tokens."""

    length: int = 4
    beam: int = 5

    @property
    def nodes(self) -> int:
        return self.length * self.beam

    def grow(self, growth: GrowRequest) -> DraftTree:
        nodes = min(growth.budget.nodes, self.nodes)
        pool = search_beam(growth, self.beam, self.length) if nodes > 0 else None
        if pool is None:
            return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        return pool.tree(growth, nodes, pool.on_beams())


POLICY = PolicyEntry(
    "merged-beams", "beams, merged", "https://arxiv.org/abs/2403.09919", MergedBeams
)
