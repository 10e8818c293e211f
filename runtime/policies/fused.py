"""Fused: a model's beam tree and a retrieved tree as one, the best nodes of both by estimate.

RASD (arXiv 2503.03434). The drafter's state retrieves; a state whose `first` is set is
asked for that before its model, which rests where every row has found something.

`fuse`: paths that begin alike are merged, a node keeps the largest estimate that any source gave
it, and of the union the nodes of largest estimate are kept: by those estimates no single source's
tree of that size is longer in expectation. Only POINT trees may be fused: their children are
functions of the past, so that taking some and leaving others changes no distribution.
Letters: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specctl.core.drafter import Budget, RoundView
from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind
from specctl.drafters.retrieval.trie import Trie, pack
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


@dataclass(frozen=True, slots=True)
class FusedTree:
    """The fused tree; bit s of `source_BN`: source s proposed the node."""

    tree: DraftTree
    source_BN: Tensor


def fuse(
    trees: Sequence[DraftTree], budget: Budget, trust: Sequence[float] | None = None
) -> FusedTree:
    """One tree of the best nodes of all. `trust[s]` scales the estimates of source s (1 by
    default). The first tree may come from a StepState: the result says which of its nodes were
    expanded (`expanded_BN`); those of the other sources never were."""
    trust = trust if trust is not None else [1.0] * len(trees)
    _check(trees)
    rows = len(trees[0].token_BN)
    device = trees[0].token_BN.device
    tables = [_table(tree) for tree in trees]
    tries = []
    origins: list[dict[int, int]] = []  # trie node -> expansion index in the first tree
    for row in range(rows):
        trie, origin = Trie(), {}
        for source, (table, scale) in enumerate(zip(tables, trust, strict=True)):
            place = _merge(trie, table, row, scale, 1 << source)
            if source == 0:
                origin = place
        tries.append(trie)
        origins.append(origin)
    tree = pack(tries, budget, device)
    chosen = [trie.best(budget.nodes, budget.depth) for trie in tries]
    expanded = [[o.get(n, -1) for n in ns] for o, ns in zip(origins, chosen, strict=True)]
    tags = [[trie.tags[n] for n in ns] for trie, ns in zip(tries, chosen, strict=True)]
    size = tree.num_nodes
    if size:
        tree = replace(tree, expanded_BN=_padded(expanded, size, -1, device))
    return FusedTree(tree, _padded(tags, size, 0, device))


@dataclass(frozen=True, slots=True)
class _Table:
    """A tree on the host."""

    token: list[list[int]]
    parent: list[list[int]]
    valid: list[list[bool]]
    estimate: list[list[float]]
    expanded: list[list[int]] | None


def _table(tree: DraftTree) -> _Table:
    estimate_BN = tree.estimate_BN
    if estimate_BN is None:
        estimate_BN = torch.ones(tree.token_BN.shape)
    return _Table(
        tree.token_BN.tolist(),
        tree.parent_BN.tolist(),
        tree.valid_BN.tolist(),
        estimate_BN.tolist(),
        None if tree.expanded_BN is None else tree.expanded_BN.tolist(),
    )


def _merge(trie: Trie, table: _Table, row: int, scale: float, tag: int) -> dict[int, int]:
    """Put one row of a tree into the trie; returns where each node went -> its expansion index."""
    at: list[int | None] = []
    place: dict[int, int] = {}
    for node, (token, parent) in enumerate(zip(table.token[row], table.parent[row], strict=True)):
        above = -1 if parent < 0 else at[parent]
        if not table.valid[row][node] or above is None:
            at.append(None)
            continue
        here = trie.add(above, token, scale * table.estimate[row][node], tag)
        at.append(here)
        place.setdefault(here, node if table.expanded is None else table.expanded[row][node])
    return place


def _padded(rows: list[list[int]], size: int, fill: int, device: torch.device) -> Tensor:
    padded = [row + [fill] * (size - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), size)


def _check(trees: Sequence[DraftTree]) -> None:
    sampled = [tree.kind for tree in trees if tree.kind is not NodeKind.POINT and tree.num_nodes]
    if sampled:
        raise RecipeError(
            "a sampled draft tree cannot be fused: leaving out a draw changes the distribution",
            found=f"nodes of kind {sampled[0]}",
            expected="trees of kind point (top-k, retrieval, n-grams)",
            do="grow the model's tree with policy dynamic-tree",
        )


POLICY = PolicyEntry(
    "fused", "a beam and a retrieved tree", "https://arxiv.org/abs/2503.03434", Fused, is_tree=False
)
