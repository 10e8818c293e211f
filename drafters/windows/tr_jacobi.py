"""TR-Jacobi (arXiv 2406.17404, section 3.3): Jacobi iteration over a tree, with a retrieved branch.

A round feeds one main chain of guesses, as Jacobi decoding does. Behind each of them the target
says what follows; behind the accepted ones these are the next main chain, and the next best tokens
of every place are side branches (the Jacobi tree). A place that the target has not spoken of yet
holds a random token of the text so far: that is the noise which targets trained by Make Some Noise
(train.joint.noise) are used to. A further branch copies what followed the longest suffix, of at
most `ngram` tokens, where it occurred last. All branches are verified in one forward. No weights,
lossless for any target; an ordinary target is confused by wrong guesses and gains little.

The paper's template tree is trained on a calibration set; here it is the best tree of the rank
chances.
Letters: B rows, C candidates, T fed tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

from torch import Tensor

from specctl.core.drafter import Budget, Drafter, Family, Needs, Outcome, Space
from specctl.drafters.option_checks import Count, Options, Within, check_rank_chances
from specctl.drafters.retrieval.best_first import Guess, best_first
from specctl.drafters.retrieval.trie import Trie, TrieState
from specctl.drafters.training_free.prompt_lookup import NgramIndex

COPIED = 0.5  # guessed chance of each copied token; in front of all side branches but the first


@dataclass(frozen=True, slots=True)
class TrJacobiOptions(Options):
    """The main chain has `depth` tokens; `chances[r]`: how often the token of rank r is the next
    one, which shapes the side branches (one entry: none). Up to `ngram` of the newest tokens are
    looked up in the text; 0 leaves the copied branch out."""

    depth: Count = 5
    chances: tuple[float, ...] = (0.4, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.015, 0.015)
    ngram: Annotated[int, Within(0)] = 3

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        check_rank_chances(self.chances)


class TrJacobi(Drafter):
    """No weights; everything is in the state."""

    family = "tr-jacobi"
    options: TrJacobiOptions

    def needs(self) -> Needs:
        return Needs(topk=min(len(self.options.chances), self.spec.vocab_size))

    def open(self, space: Space) -> TrJacobiState:
        return TrJacobiState(self.options, space)


@dataclass(slots=True)
class Guesses:
    """Of one row: `places[i]` are the candidates of the token i + 1 places behind its root, the
    best first; `fed` is the length of the main chain that is being verified. One writer: the
    state."""

    text: NgramIndex
    places: list[list[int]] = field(default_factory=list)
    fed: int = 0


class TrJacobiState(TrieState):
    """The guesses of every slot. In a tree of this state the main chain comes first."""

    def __init__(self, options: TrJacobiOptions, space: Space) -> None:
        self.options, self.device = options, space.device
        self.rows = [self._blank() for _ in range(space.num_slots)]

    def _blank(self) -> Guesses:
        return Guesses(NgramIndex(range(self.options.ngram, 0, -1)))

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.rows[slot] = self._blank()

    def end(self, slot: int) -> None:
        self.rows[slot] = self._blank()

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        row, options = self.rows[slot], self.options
        depth = min(options.depth, budget.depth, budget.nodes)
        chance = random.Random(len(tokens))
        places = row.places[:depth]
        places += [[chance.choice(tokens)] for _ in range(depth - len(places))]
        row.fed = depth
        trie = Trie()
        trie.add_path((place[0] for place in places), [1.0] * depth)
        if options.ngram:
            row.text.read(tokens)
            path = row.text.continuation(tokens, min(options.depth, budget.depth))
            trie.add_path(path, [COPIED**d for d in range(1, len(path) + 1)])
        if len(trie) < budget.nodes:
            known = row.places[:depth]
            side = Budget(budget.nodes, len(known))
            trie.absorb(best_first(lambda at: self._children(known, at), 0, side))
        return trie

    def _children(self, places: Sequence[Sequence[int]], at: int) -> list[Guess[int]]:
        if at >= len(places):
            return []
        ranked = zip(places[at], self.options.chances, strict=False)
        return [Guess(token, chance, at + 1) for token, chance in ranked]

    def observe(self, outcome: Outcome) -> None:
        """What the target said along the main chain, behind as many places as were accepted. Where
        another branch was accepted, the main chain stands in for what was not fed behind it."""
        slots, accepted = outcome.view.slots, outcome.num_accepted
        if outcome.topk_BTC is None:
            for slot in slots:
                self.rows[slot].places = []
            return
        most = 1 + max(self.rows[slot].fed for slot in slots)
        best_BTC = outcome.topk_BTC[:, :most].tolist()
        for slot, count, best_TC in zip(slots, accepted, best_BTC, strict=True):
            row = self.rows[slot]
            row.places = list(islice(best_TC, count + 1, row.fed + 1))
            row.fed = 0  # of a round without a proposal nothing is kept


FAMILY = Family(
    name="tr-jacobi",
    summary=(
        "No draft model: the target corrects its own guesses of the next tokens, a tree of them in "
        "every round, beside a branch copied from earlier text. Made for targets that were trained "
        "to predict well behind wrong tokens (recipe make-some-noise); of others little is "
        "accepted beyond what is copied."
    ),
    paper="https://arxiv.org/abs/2406.17404",
    options=TrJacobiOptions,
    build=TrJacobi,
    trainable=False,
    policies=("direct",),
)
