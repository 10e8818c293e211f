"""Trees of deterministic guesses, built on the host: best first, or from branches.

A guess has a chance of being right if its parent was. The `nodes` nodes with the largest product of
chances along their path are the tree with the largest expected number of accepted tokens,
sum over nodes of that product: products fall along a path, so what is taken best first is always
connected, and no other tree of that size has a larger sum.
Letters: B rows, N nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import torch

from specctl.drafters.parts.store import Ids
from specctl.drafters.parts.tree import DraftTree, NodeKind, empty_tree

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Guess(Generic[Place]):
    """A token, the chance that it follows its parent, the place from which drafting goes on, and
    where the guess comes from (a number that means something to the drafter alone)."""

    token: int
    chance: float
    place: Place
    source: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A drafted token under node `parent` (-1 = the root), the product of chances, its source."""

    token: int
    parent: int
    estimate: float
    source: int = 0


def best_first(
    children: Callable[[Place], Iterable[Guess[Place]]], root: Place, nodes: int, depth: int
) -> list[Node]:
    """At most `nodes` nodes, no deeper than `depth`, best first. Of guesses of one token under one
    parent the first counts."""
    order, taken = count(), list[Node]()
    heap: list[tuple[float, int, int, int, Guess[Place]]] = []

    def push(place: Place, parent: int, level: int, estimate: float) -> None:
        seen = set()
        for guess in children(place):
            if guess.token not in seen and guess.chance > 0.0:
                seen.add(guess.token)
                item = (-estimate * guess.chance, next(order), parent, level, guess)
                heapq.heappush(heap, item)

    if depth > 0 and nodes > 0:
        push(root, -1, 1, 1.0)
    while heap and len(taken) < nodes:
        negative, _, parent, level, guess = heapq.heappop(heap)
        taken.append(Node(guess.token, parent, -negative, guess.source))
        if level < depth:
            push(guess.place, len(taken) - 1, level + 1, -negative)
    return taken


def from_branches(branches: Iterable[tuple[int, Ids]], nodes: int, depth: int) -> list[Node]:
    """Token sequences, each with its source, merged into one tree in their order until it is full.
    Equal beginnings are one path, of the first source; what does not fit is cut."""
    taken, at = list[Node](), dict[tuple[int, int], int]()
    for source, branch in branches:
        parent = -1
        for token in branch[:depth]:
            if (parent, token) not in at:
                if len(taken) == nodes:
                    return taken
                at[parent, token] = len(taken)
                taken.append(Node(token, parent, 1.0, source))
            parent = at[parent, token]
    return taken


def point_tree(rows: Sequence[Sequence[Node]], device: torch.device) -> DraftTree:
    """One tree per row, padded to the largest; siblings rank in their order."""
    widest = max(map(len, rows), default=0)
    if widest == 0:
        return empty_tree(len(rows), device)
    tokens, parents, ranks, estimates, depth = [], [], [], [], 0
    for row in rows:
        num_children, levels = dict[int, int](), list[int]()
        rank = []
        for node in row:
            rank.append(num_children.get(node.parent, 0))
            num_children[node.parent] = rank[-1] + 1
            levels.append(1 if node.parent < 0 else levels[node.parent] + 1)
        rest = widest - len(row)
        tokens.append([node.token for node in row] + [0] * rest)
        parents.append([node.parent for node in row] + [-1] * rest)
        ranks.append(rank + [0] * rest)
        estimates.append([node.estimate for node in row] + [0.0] * rest)
        depth = max(depth, *levels, 0)
    table = torch.tensor([tokens, parents, ranks], device=device)
    filled_B1 = torch.tensor([[len(row)] for row in rows], device=device)
    return DraftTree(
        table[0],
        table[1],
        table[2],
        torch.arange(widest, device=device) < filled_B1,
        NodeKind.POINT,
        depth,
        is_chain=depth == widest,
        estimate_BN=torch.tensor(estimates, device=device),
    )
