"""Direct: the drafter proposes its own tree in one go (retrieval, parallel heads)."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.tree import DraftTree
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry


@dataclass(frozen=True, slots=True)
class Direct(PointTree):
    """At most `nodes` nodes and `length` levels of whatever the drafter proposes."""

    length: int = 5
    nodes: int = 24

    def grow(self, growth: GrowRequest) -> DraftTree:
        return growth.state.propose(growth.view, growth.budget)


POLICY = PolicyEntry(
    "direct", "the tree that the drafter proposes by itself", "", Direct, is_tree=False
)
