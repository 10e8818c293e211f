"""Candidates: several independent candidates at every position (multi-candidate speculative
decoding, arXiv 2401.06706), with the decision of its improvement (arXiv 2409.10644).

Sampled rows draw `branch[d]` children of each node independently from q and keep duplicates (kind
IID): rejecting one then tells nothing about the next beyond the residual. The improvement decides
after each level whether another is worth drafting. Here a level is followed by another only where
the drafter is sure enough of some node that is already in the tree; what that node's children turn
out to be is not known when it decides. Its other idea, seeding the first level from the target's
own distribution, is the engine's bonus token: once that token is drawn its rivals cannot win.
Letters: B rows, K draft vocabulary, M new nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.policies.base import GrowRequest, PolicyEntry
from specctl.runtime.policies.draw import log_guess
from specctl.runtime.policies.shaped import grow_shape, shape_of
from specctl.runtime.policies.static_tree import BranchTree, full_paths


@dataclass(frozen=True, slots=True)
class Candidates(BranchTree):
    """Another level only where some node's largest probability is at least `confidence` (None:
    always)."""

    confidence: float | None = None

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.IID if sampled else NodeKind.POINT

    def grow(self, growth: GrowRequest) -> DraftTree:
        budget, device = growth.budget, growth.view.slot_B.device
        shape = shape_of(full_paths(self.branch), budget.nodes, budget.depth, device)
        decide = None if self.confidence is None else self._is_sure
        return grow_shape(growth, shape, self.kind(growth.sampled), decide)

    def _is_sure(self, logits_BMK: Tensor) -> Tensor:
        assert self.confidence is not None
        best_BM = log_guess(logits_BMK).amax(-1).exp()
        return (best_BM >= self.confidence).any(1) & torch.isfinite(best_BM).all(1)


POLICY = PolicyEntry(
    "mcsd", "independent draws, duplicates kept", "https://arxiv.org/abs/2401.06706", Candidates
)
