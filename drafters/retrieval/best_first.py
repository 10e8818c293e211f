"""Best first: grow the tree of guesses that is expected to be accepted furthest.

A guess has a chance of being right if its parent was. The `nodes` nodes with the largest product of
chances along their path are the tree with the largest expected number of accepted tokens,
sum over nodes of that product: products fall along a path, so what is taken best first is always
connected, and no other tree of that size has a larger sum. Places are expanded only when they are
reached, so a model of any size may stand behind `children`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from specctl.core.drafter import Budget
from specctl.drafters.retrieval.trie import Trie

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Guess(Generic[Place]):
    """A token, the chance that it follows its parent, the place from which drafting goes on, and a
    tag that says where the guess comes from."""

    token: int
    chance: float
    place: Place
    tag: int = 0


def best_first(
    children: Callable[[Place], Iterable[Guess[Place]]], root: Place, budget: Budget
) -> Trie:
    """The best tree within the budget. Of guesses of one token under one parent the first counts;
    a guess without a chance is none."""
    order, taken = count(), Trie()
    heap: list[tuple[float, int, int, Guess[Place]]] = []

    def push(place: Place, parent: int, estimate: float) -> None:
        seen = set()
        for guess in children(place):
            if guess.token not in seen and guess.chance > 0.0:
                seen.add(guess.token)
                heapq.heappush(heap, (-estimate * guess.chance, next(order), parent, guess))

    if budget.depth > 0:
        push(root, -1, 1.0)
    while heap and len(taken) < budget.nodes:
        negative, _, parent, guess = heapq.heappop(heap)
        node = taken.add(parent, guess.token, -negative, guess.tag)
        if taken.depths[node] < budget.depth:
            push(guess.place, node, -negative)
    return taken
