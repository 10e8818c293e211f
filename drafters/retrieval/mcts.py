"""The most visited tree: a Monte-Carlo tree search over guesses, guided by PUCT.

One simulation walks from the root, each time to the child with the largest

    Q + P sqrt(N_parent) / (1 + N) (c1 + log((N_parent + c2 + 1) / c2))

until it meets a node for the first time, the depth, or a place without guesses; the path
probability of where it ends joins the mean Q of every node on the way. Before its first visit a
node's Q is its own path probability. Visits lower the second term, which spreads the walks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from math import log, sqrt
from typing import Any

from specctl.core.drafter import Budget
from specctl.drafters.retrieval.best_first import Guess
from specctl.drafters.retrieval.trie import Trie


@dataclass(frozen=True, slots=True)
class Puct:
    """How many walks, and how much they explore."""

    simulations: int = 64
    c1: float = 1.25
    c2: float = 19652.0


class _Spot:
    """A node of the search. One writer: the search."""

    __slots__ = ("children", "level", "path", "place", "prior", "token", "total", "visits")

    def __init__(self, token: int, prior: float, path: float, level: int, place: Any) -> None:
        self.token, self.prior, self.path, self.level, self.place = token, prior, path, level, place
        self.visits, self.total = 0, 0.0
        self.children: list[_Spot] | None = None

    def best_child(self, explore: float) -> _Spot:
        def score(child: _Spot) -> float:
            value = child.total / child.visits if child.visits else child.path
            return value + explore * child.prior / (1 + child.visits)

        assert self.children, "only a node with children is walked through"
        return max(self.children, key=score)


def most_visited(
    children: Callable[[Any], Iterable[Guess[Any]]], root: Any, budget: Budget, puct: Puct
) -> Trie:
    """The most visited nodes within the budget (a parent is visited whenever a child is)."""
    top = _Spot(-1, 1.0, 1.0, 0, root)
    for _ in range(puct.simulations if budget.nodes > 0 else 0):
        trail = [top]
        while trail[-1].level < budget.depth and (len(trail) == 1 or trail[-1].visits):
            spot = trail[-1]
            if spot.children is None:
                spot.children = _expanded(spot, children)
            if not spot.children:
                break
            growth = puct.c1 + log((spot.visits + puct.c2 + 1) / puct.c2)
            trail.append(spot.best_child(sqrt(spot.visits) * growth))
        for spot in trail:
            spot.visits += 1
            spot.total += trail[-1].path
    return _best(top, budget.nodes)


def _expanded(spot: _Spot, children: Callable[[Any], Iterable[Guess[Any]]]) -> list[_Spot]:
    found: dict[int, _Spot] = {}
    for guess in children(spot.place):
        if guess.chance > 0.0:
            path = spot.path * guess.chance
            new = _Spot(guess.token, guess.chance, path, spot.level + 1, guess.place)
            found.setdefault(guess.token, new)
    return list(found.values())


def _best(top: _Spot, nodes: int) -> Trie:
    order, taken = count(), Trie()
    heap = [(-child.visits, next(order), -1, child) for child in top.children or ()]
    heapq.heapify(heap)
    while heap and len(taken) < nodes:
        negative, _, parent, spot = heapq.heappop(heap)
        if negative == 0:
            break
        node = taken.add(parent, spot.token, spot.path)
        for child in spot.children or ():
            heapq.heappush(heap, (-child.visits, next(order), node, child))
    return taken
