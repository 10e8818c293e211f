"""OptTree: the tree of a node budget with the largest expected acceptance (arXiv 2406.17276).

If q guesses acceptance, a tree is expected to yield the sum over its nodes of the product of q on
the path, E[A]. As products fall along a path, the `nodes` best nodes are the best tree, and a beam
as wide as the budget misses none of them. After each level E[A] is compared with that of the level
before: once it has grown by no more than `threshold`, another level costs more than it brings. The
threshold is about the cost of a draft step over the cost of a plain target step; with measured
costs it is exactly that.
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specctl.core.tree import DraftTree
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.beam import Pool, grow_beam


@dataclass(frozen=True, slots=True)
class OptTree(PointTree):
    """The best `nodes` nodes; at most `length` levels, fewer in a row whose E[A] grows by no
    more than `threshold`. `beam` nodes are expanded per level (None: as many as are kept)."""

    length: int = 8
    nodes: int = 24
    beam: int | None = None
    threshold: float = 0.2

    def grow(self, growth: GrowRequest) -> DraftTree:
        width = self.nodes if self.beam is None else self.beam
        return grow_beam(growth, width, self.nodes, self.length, _Gain(self.nodes, self.threshold))

    def fitted(self, costs: TreeCosts) -> OptTree:
        """A level must bring more plain target steps than it costs."""
        return replace(self, threshold=costs.step / costs.verify_seconds(0))


POLICY = PolicyEntry("opt-tree", "the best nodes by q", "https://arxiv.org/abs/2406.17276", OptTree)


class _Gain:
    """Has E[A] grown by no more than the threshold since it was asked last?"""

    def __init__(self, nodes: int, threshold: float) -> None:
        self.nodes, self.threshold = nodes, threshold
        self.value_B: torch.Tensor | float = 0.0

    def __call__(self, pool: Pool) -> torch.Tensor:
        value_B = pool.value(self.nodes)
        grown_B, self.value_B = value_B - self.value_B, value_B
        return grown_B <= self.threshold
