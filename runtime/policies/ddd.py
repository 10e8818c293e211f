"""DynamicDepth: a dynamic tree whose depth follows the drafter's own confidence.

DDD ("Dynamic Depth Decoding", arXiv 2409.00142) keeps EAGLE-2's beam and stops drafting when the
summed path probability of the beam falls below a threshold: that sum guesses the chance that the
text is still on the beam, and so bounds what another level can bring. Asked at some depths only,
since the answer has to reach the host.
Letters: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.beam import Pool, grow_beam


@dataclass(frozen=True, slots=True)
class DynamicDepth(PointTree):
    """`nodes` kept of a beam `beam` wide and at most `length` deep; after each depth of `check`
    a row's drafting ends if its beam holds less than `threshold`. Check () asks at every depth."""

    length: int = 10
    nodes: int = 20
    beam: int = 4
    threshold: float = 0.25
    check: tuple[int, ...] = ()

    def grow(self, growth: GrowRequest) -> DraftTree:
        return grow_beam(growth, self.beam, self.nodes, self.length, self._is_enough)

    def _is_enough(self, pool: Pool) -> Tensor:
        mass_B = pool.frontier_mass()
        if self.check and pool.num_levels not in self.check:
            return torch.zeros_like(mass_B, dtype=torch.bool)
        return mass_B < self.threshold

    def fitted(self, costs: TreeCosts) -> DynamicDepth:
        """A level brings at most the beam's mass of plain target steps, and must bring its cost."""
        return replace(self, threshold=costs.step / costs.verify_seconds(0))


POLICY = PolicyEntry(
    "ddd", "a beam as deep as the drafter is sure", "https://arxiv.org/abs/2409.00142", DynamicDepth
)
