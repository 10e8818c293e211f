"""DynamicTree: a context-dependent tree by drafter confidence (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.tree import DraftTree
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.beam import grow_beam


@dataclass(frozen=True, slots=True)
class DynamicTree(PointTree):
    """`nodes` kept of a beam search `length` levels deep and `beam` wide."""

    length: int = 5
    nodes: int = 16
    beam: int = 4

    def grow(self, growth: GrowRequest) -> DraftTree:
        return grow_beam(growth, self.beam, self.nodes, self.length)


POLICY = PolicyEntry(
    "dynamic-tree", "a beam's best nodes (EAGLE-2)", "https://arxiv.org/abs/2406.16858", DynamicTree
)
