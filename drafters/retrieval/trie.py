"""Trie: candidate continuations of one row on the host, and their way into a DraftTree.

A node's estimate is the guessed chance that the path down to it is accepted, so it never exceeds
its parent's. The best `n` nodes are then the `n` largest estimates, and they hang together: this
choice has the largest expected length, 1 + the sum of the estimates, among all trees of n nodes.
Letters: B rows, N nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specctl.core.drafter import Budget, DraftState, RoundView
from specctl.core.tree import DraftTree, NodeKind, empty_tree


@dataclass(slots=True)
class Trie:
    """Nodes in order of insertion, parents first (-1 = the root). One writer: whoever grows it.
    `tags` are free for sources of nodes; nodes that merge keep the bits of both."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    _child: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, estimate: float, tag: int = 0) -> int:
        """The child of `parent` that carries `token`; a node proposed twice keeps the larger
        estimate, and no node is thought likelier than its parent."""
        if parent >= 0:
            estimate = min(estimate, self.estimates[parent])
        node = self._child.get((parent, token))
        if node is not None:
            self.estimates[node] = max(self.estimates[node], estimate)
            self.tags[node] |= tag
            return node
        node = self._child[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.estimates.append(estimate)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
        self.tags.append(tag)
        return node

    def add_path(self, tokens: Iterable[int], estimates: Iterable[float], tag: int = 0) -> None:
        """A path from the root; what it shares with earlier ones is merged."""
        node = -1
        for token, estimate in zip(tokens, estimates, strict=False):
            node = self.add(node, token, estimate, tag)

    def absorb(self, other: Trie, trust: float = 1.0, tag: int = 0) -> None:
        """Merge another trie into this one, its estimates times `trust`."""
        at: dict[int, int] = {-1: -1}
        for node in range(len(other)):
            parent, estimate = at[other.parents[node]], trust * other.estimates[node]
            at[node] = self.add(parent, other.tokens[node], estimate, tag | other.tags[node])

    def part(self, nodes: Sequence[int]) -> Trie:
        """Only these nodes, which come with their parents, and parents first."""
        small, at = Trie(), {-1: -1}
        for node in nodes:
            parent = at[self.parents[node]]
            at[node] = small.add(parent, self.tokens[node], self.estimates[node], self.tags[node])
        return small

    def walk(self, tokens: Iterable[int]) -> Iterator[tuple[list[int], int | None]]:
        """From the root along `tokens`: the children of each node that is reached, and which of
        them carries the next token (None: none does, and the walk ends)."""
        node: int | None = -1
        for token in tokens:
            if node is None:
                return
            children = [n for n, parent in enumerate(self.parents) if parent == node]
            node = self._child.get((node, token))
            yield children, node

    def best(self, nodes: int, depth: int) -> list[int]:
        """The `nodes` nodes of largest estimate no deeper than `depth`, parents first."""
        fitting = [node for node, at in enumerate(self.depths) if at <= depth]
        return sorted(sorted(fitting, key=lambda node: -self.estimates[node])[:nodes])


def merged(continuations: Iterable[Sequence[int]]) -> Trie:
    """The trie of continuations that are equally good: earlier ones go into a budget first."""
    trie = Trie()
    for ids in continuations:
        trie.add_path(ids, [1.0] * len(ids))
    return trie


def counted(continuations: Sequence[Sequence[int]], trust: float = 1.0, tag: int = 0) -> Trie:
    """The trie of continuations; a node's estimate is the share of them that pass through it, times
    `trust`: the counts that REST and SuffixDecoding draft by."""
    trie, count = Trie(), [0] * sum(len(ids) for ids in continuations)
    for ids in continuations:
        node = -1
        for token in ids:
            node = trie.add(node, token, 1.0, tag)
            count[node] += 1
    total = max(1, len(continuations))
    trie.estimates = [trust * count[node] / total for node in range(len(trie))]
    return trie


def pack(tries: Sequence[Trie], budget: Budget, device: torch.device) -> DraftTree:
    """The best nodes of each row's trie as one padded POINT tree."""
    chosen = [trie.best(budget.nodes, budget.depth) for trie in tries]
    most = max((len(nodes) for nodes in chosen), default=0)
    if most == 0:
        return empty_tree(len(tries), device)
    depth = max(t.depths[n] for t, nodes in zip(tries, chosen, strict=True) for n in nodes)
    columns = [_columns(t, nodes, most) for t, nodes in zip(tries, chosen, strict=True)]
    ints = torch.tensor([c[:3] for c in columns], device=device)
    estimate_BN = torch.tensor([c[3] for c in columns], device=device)
    filled_B1 = torch.tensor([[len(nodes)] for nodes in chosen], device=device)
    valid_BN = torch.arange(most, device=device) < filled_B1
    is_chain = all(c[1] == list(range(-1, most - 1)) for c in columns)
    parent_BN = ints[:, 1] if is_chain else ints[:, 1].masked_fill(~valid_BN, -1)
    return DraftTree(
        ints[:, 0],
        parent_BN,
        ints[:, 2],
        valid_BN,
        NodeKind.POINT,
        depth,
        is_chain=is_chain,
        estimate_BN=estimate_BN,
    )


def _columns(
    trie: Trie, nodes: list[int], size: int
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Tokens, parents, ranks and estimates of the chosen nodes, padded as a chain would go on."""
    new = {node: index for index, node in enumerate(nodes)} | {-1: -1}
    parents = [new[trie.parents[node]] for node in nodes]
    seen: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    pad = size - len(nodes)
    return (
        [trie.tokens[node] for node in nodes] + [0] * pad,
        parents + list(range(len(nodes) - 1, size - 1)),
        ranks + [0] * pad,
        [trie.estimates[node] for node in nodes] + [0.0] * pad,
    )


class TrieState(DraftState):
    """A DraftState whose rows are drafted one by one on the host, from their own tokens."""

    device: torch.device

    @abstractmethod
    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        """Candidates of one row, whose text is `tokens`; the budget takes the best of them."""

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        rows = zip(view.slots, view.tokens, strict=True)
        return pack(
            [self.draft_row(slot, text, budget) for slot, text in rows], budget, self.device
        )
