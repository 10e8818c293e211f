"""TopPlusOne: of every node's children all but one are the likeliest tokens, one is a sample.

The sample is drawn from what the fixed children leave of q and stands first (kind TOP_PLUS_ONE; Hu
et al., arXiv 2502.18779). At low entropy the fixed children are nearly always right, and the sample
keeps the tree useful where q is flat. Where nothing is sampled this is a tree of best tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.policies.base import GrowRequest, PolicyEntry
from specctl.runtime.policies.static_tree import BranchTree, grow_whole_levels


@dataclass(frozen=True, slots=True)
class TopPlusOne(BranchTree):
    """Children per node by level, the root's first. A level that does not fit whole is left out: a
    missing sibling would change the distribution of the sample beside it."""

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.TOP_PLUS_ONE if sampled else NodeKind.POINT

    def grow(self, growth: GrowRequest) -> DraftTree:
        return grow_whole_levels(growth, self.branch, self.kind(growth.sampled))


POLICY = PolicyEntry(
    "top-plus-one", "best tokens, one sample", "https://arxiv.org/abs/2502.18779", TopPlusOne
)
