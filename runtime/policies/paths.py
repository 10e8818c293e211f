"""Paths: several whole continuations, each sampled alone (multi-path drafting, arXiv 2602.16961).

Paths fork at the root only and are independent of each other (kind PATHS), which is what the rule
`multi-path` needs to know the distribution of the best of them. Where nothing is sampled the paths
begin with the best tokens and go on greedily.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.static_tree import grow_whole_levels


@dataclass(frozen=True, slots=True)
class Paths(PointTree):
    """`beam` paths of `length` tokens."""

    length: int = 4
    beam: int = 2

    @property
    def branch(self) -> tuple[int, ...]:
        return (self.beam, *[1] * (self.length - 1))

    @property
    def nodes(self) -> int:
        return self.beam * self.length

    @property
    def is_chain(self) -> bool:
        return self.beam == 1

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.PATHS if sampled else NodeKind.POINT

    def grow(self, growth: GrowRequest) -> DraftTree:
        return grow_whole_levels(growth, self.branch, self.kind(growth.sampled))


POLICY = PolicyEntry(
    "paths", "whole continuations, each sampled alone", "https://arxiv.org/abs/2602.16961", Paths
)
