"""Direct: the drafter proposes its own tree in one go (retrieval, parallel heads)."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.drafters.parts.tree import DraftTree, NodeKind
from specctl.runtime.policies.base import Growth


@dataclass(frozen=True, slots=True)
class Direct:
    """At most `nodes` nodes and `length` levels of whatever the drafter proposes."""

    length: int = 5
    nodes: int = 24

    @property
    def depth(self) -> int:
        return self.length

    @property
    def is_chain(self) -> bool:
        return False

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.POINT

    def grow(self, growth: Growth) -> DraftTree:
        return growth.state.propose(growth.view, growth.budget)
