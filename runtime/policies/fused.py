"""Fused: a model's beam tree and a retrieved tree as one, the best nodes of both by estimate.

RASD (arXiv 2503.03434). The drafter's state says what it retrieves; a state whose `first` is set is
asked for that before its model, which rests where every row has found something.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from specctl.core.drafter import Budget, RoundView
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree
from specctl.drafters.retrieval.fuse import fuse
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.beam import grow_beam


@runtime_checkable
class Retrieving(Protocol):
    """A StepState that retrieves beside its model."""

    first: bool

    def retrieve(self, view: RoundView, budget: Budget) -> DraftTree:
        """A POINT tree per row, pruned by what the model has read in this round."""


@dataclass(frozen=True, slots=True)
class Fused(PointTree):
    """`nodes` kept of a beam search `length` levels deep and `beam` wide, and of retrieval."""

    length: int = 5
    nodes: int = 16
    beam: int = 4

    def grow(self, growth: GrowRequest) -> DraftTree:
        state, budget = growth.state, growth.budget
        if not isinstance(state, Retrieving):
            raise RecipeError(
                "policy fused needs a drafter that retrieves",
                where="serve.policy",
                found=type(state).__name__,
                expected="family rasd",
                do="write policy: dynamic-tree",
            )
        if state.first:
            found = state.retrieve(growth.view, budget)
            if found.num_nodes and bool(found.valid_BN.any(1).all()):
                return replace(found, expanded_BN=torch.full_like(found.parent_BN, -1))
        own = grow_beam(growth, self.beam, self.nodes, self.length)
        return fuse((own, state.retrieve(growth.view, budget)), budget).tree


POLICY = PolicyEntry(
    "fused", "a beam and a retrieved tree", "https://arxiv.org/abs/2503.03434", Fused, is_tree=False
)
