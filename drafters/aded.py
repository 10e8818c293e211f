"""ADED (arXiv 2407.12021): drafts from an adaptive tri-gram model of the target.

The model holds P(t3 | t1, t2) for the `topk` best t3 of each pair. After every round the pair that
ends at each fed token takes in the target's own probabilities (`parts/distributions.py`, fading):
what the target favours rises, what it no longer mentions fades. A pair never seen falls back to its
last token alone. Three makers turn the model into a tree of the round's node budget:

    mcts        the most visited nodes of a PUCT search over path probabilities (`parts/mcts.py`)
    best-first  the nodes with the largest path probability, which is the tree that maximises the
                expected accepted tokens if P is right, for a tenth of the work
    ranks       a fixed shape, whatever P says: what adapting the shape is measured against
Letters: B rows, T fed tokens, N nodes, V target vocabulary, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specctl.core.drafter import (
    Budget,
    Family,
    Outcome,
    Space,
)
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.heads import check_choice
from specctl.drafters.retrieval.best_first import Guess, best_first
from specctl.drafters.retrieval.mcts import Puct, most_visited
from specctl.drafters.retrieval.store import Ids
from specctl.drafters.retrieval.store_registry import Scope
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
class AdedOptions:
    """`topk` continuations of a pair; `keep`: how much an old estimate weighs against a new one
    (1 = never learn again); `maker` of the tree, `simulations` of maker mcts; `scope` says whose
    text may help whom (request, conversation, process), `max_mib` caps each store."""

    topk: int = 8
    keep: float = 0.25
    maker: str = "best-first"
    simulations: int = 64
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        check_choice("maker", self.maker, MAKERS)
        if self.topk < 1 or not 0.0 <= self.keep <= 1.0 or self.simulations < 1:
            raise RecipeError(
                "an option of aded is out of range",
                where="drafter.options",
                found=f"topk {self.topk}, keep {self.keep}, simulations {self.simulations}",
                expected="topk >= 1, keep between 0 and 1, simulations >= 1",
                do="leave them out to take the defaults",
            )


class Aded(NgramDrafter):
    """No weights; the tri-grams are in stores."""

    family: ClassVar[str] = "aded"

    def open(self, space: Space) -> AdedState:
        return AdedState(self, space)


class AdedState(TrieState):
    """One store per row or shared, by scope."""

    def __init__(self, drafter: Aded, space: Space) -> None:
        self.options, self.device = drafter.options, space.device
        self.stores = drafter.room.rows(space.identity, space.num_slots)

    def join(self, slot: int, conversation: str | None) -> None:
        self.stores.join(slot, conversation)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        del taps
        learn_text(self.stores.start(slot), tokens, LENGTHS, self.options.keep)

    def end(self, slot: int) -> None:
        self.stores.end(slot)

    def sprout(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
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


def build(options: AdedOptions, spec: ModelSpec, vocab: VocabMap | None) -> Aded:
    return Aded(options, spec, vocab)


FAMILY = Family(
    name="aded",
    summary=(
        "No training: a tri-gram model of the target that learns from every token the target was "
        "fed, and a tree shaped by what the model finds likely. Like token-recycling, with one "
        "more token of context and trees that are deep where it is sure and wide where it is not."
    ),
    paper="https://arxiv.org/abs/2407.12021",
    options=AdedOptions,
    build=build,
    trainable=False,
    policies=("direct",),
)
