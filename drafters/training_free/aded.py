"""ADED (arXiv 2407.12021): drafts from an adaptive tri-gram model of the target.

The model holds P(t3 | t1, t2) for the `topk` best t3 of each pair. After every round the pair that
ends at each fed token takes in the target's own probabilities (`states/ngram_distributions.py`):
what the target favours rises, what it no longer mentions fades. A pair never seen falls back to its
last token alone. Three makers turn the model into a tree of the round's node budget:

    mcts        the most visited nodes of a PUCT search over path probabilities (the paper's)
    best-first  the nodes with the largest path probability, which is the tree that maximises the
                expected accepted tokens if P is right, for a tenth of the work
    ranks       a fixed shape, whatever P is: what adapting the shape is measured against

The search: one simulation walks from the root, each time to the child with the largest

    Q + P sqrt(N_parent) / (1 + N) (c1 + log((N_parent + c2 + 1) / c2))

until it reaches a node for the first time, the depth, or a place without guesses; the path
probability of where it ends joins the mean Q of every node on the way. Before its first visit a
node's Q is its own path probability. Visits lower the second term, which spreads the walks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import log, sqrt
from typing import Annotated, Any

from torch import Tensor

from specctl.core.drafter import Budget, Family, Outcome, Space
from specctl.drafters.option_checks import OneOf, Options, check_options
from specctl.drafters.retrieval.best_first import Guess, best_first
from specctl.drafters.retrieval.store import Ids
from specctl.drafters.retrieval.store_registry import Scope, StoredState
from specctl.drafters.retrieval.trie import Trie, TrieState
from specctl.drafters.states.ngram_distributions import (
    NgramDrafter,
    learn_round,
    learn_text,
    step,
    tail,
)

MAKERS = ("best-first", "mcts", "ranks")
LENGTHS = range(2, 0, -1)  # of the contexts: the pair, then its last token
RANK_CHANCES = (0.5, 0.13, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)  # those of token-recycling


@dataclass(frozen=True, slots=True)
class AdedOptions(Options):
    """`topk` continuations of a pair; `keep`: how much an old estimate weighs against a new one
    (1 = never learn again); `maker` of the tree, `simulations` of maker mcts; `scope` says whose
    text may help whom (request, conversation, process), `max_mib` caps each store."""

    topk: int = 8
    keep: float = 0.25
    maker: Annotated[str, OneOf(MAKERS)] = "mcts"
    simulations: int = 64
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        is_right = self.topk >= 1 and 0.0 <= self.keep <= 1.0 and self.simulations >= 1
        expected = "topk >= 1, keep between 0 and 1, simulations >= 1"
        check_options(self, is_right, ("topk", "keep", "simulations"), expected)


class Aded(NgramDrafter):
    """No weights; the tri-grams are in stores."""

    family = "aded"

    def open(self, space: Space) -> AdedState:
        return AdedState(self, space)


class AdedState(StoredState, TrieState):
    """One store per row or shared, by scope."""

    def __init__(self, drafter: Aded, space: Space) -> None:
        self.options, self.device = drafter.options, space.device
        self.stores = drafter.registry.rows(space.identity, space.num_slots)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        learn_text(self.stores.start(slot), tokens, LENGTHS, self.options.keep)

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        store, root = self.stores.at(slot), tail(tokens, LENGTHS.start)
        by_rank = self.options.maker == "ranks"

        def children(place: Ids) -> Iterable[Guess[Ids]]:
            found = store.longest(place, LENGTHS)
            chances = RANK_CHANCES if by_rank else [each.weight for each in found]
            for each, chance in zip(found, chances, strict=False):
                token = each.ids[0]
                yield Guess(token, chance, step(place, token, LENGTHS.start))

        if self.options.maker == "mcts":
            puct = Puct(self.options.simulations)
            return most_visited(children, root, budget, puct)
        return best_first(children, root, budget)

    def observe(self, outcome: Outcome) -> None:
        learn_round(self.stores, outcome, LENGTHS, self.options.keep)


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


FAMILY = Family(
    name="aded",
    summary=(
        "No training: a tri-gram model of the target that learns from every token the target was "
        "fed, and a tree shaped by what the model finds likely. Like token-recycling, with one "
        "more token of context and trees that are deep where it is sure and wide where it is not."
    ),
    paper="https://arxiv.org/abs/2407.12021",
    options=AdedOptions,
    build=Aded,
    trainable=False,
    policies=("direct",),
)
