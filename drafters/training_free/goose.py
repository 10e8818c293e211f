"""Goose (arXiv 2604.02047): one tree from a reliable and an unreliable source, each in its place.

The spine is what followed the newest tokens when they last occurred in the text (as prompt-lookup
drafts it); the branches are the target's newest best tokens after a token (as token-recycling keeps
them). The paper proves that where one source is accepted more often, the best tree is deep along it
and wide along the other. Here every node has a chance, the running acceptance of its source, and
the nodes with the largest product of chances along their path are kept (`retrieval/best_first.py`):
that is the best tree for these chances, its spine grows with the quality of the match, and without
a match it is the branches' tree alone. The sources, each with an acceptance of its own:

    spine, by match length (a spine token that is accepted makes the match one longer)
    branch of rank r beside a spine token, and branch of rank r alone

`shape: balanced` gives a node its rank's chance whatever it comes from: the isotropic tree.

A guess is tested when the text reaches its parent: the token that the target chose there says
whether it was right. Guesses that the text never reached are not counted, nor is a round that was
cut short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from specctl.core.drafter import Budget, Family, Outcome, Space
from specctl.core.errors import RecipeError
from specctl.drafters.option_checks import OneOf, Options
from specctl.drafters.retrieval.best_first import Guess, best_first
from specctl.drafters.retrieval.store import NgramStore
from specctl.drafters.retrieval.store_registry import Scope, StoredState
from specctl.drafters.retrieval.trie import Trie, TrieState
from specctl.drafters.states.ngram_distributions import NgramDrafter, learn_round
from specctl.drafters.training_free.prompt_lookup import NgramIndex

SHAPES = ("spine", "balanced")
LAST = range(1, 0, -1)  # branches are keyed by one token
Place = tuple[int, int]  # spine tokens behind us (-1 = off the spine), the newest token


@dataclass(frozen=True, slots=True)
class GooseOptions(Options):
    """First guesses of the acceptance of spine tokens (`spine[n]`: behind a match of n + 1 tokens)
    and of branches by rank; both are corrected while drafting. `shape` of the tree. `scope` of the
    branches says whose text may help whom (request, conversation, process)."""

    spine: tuple[float, ...] = (0.3, 0.5, 0.65, 0.75)
    branches: tuple[float, ...] = (0.4, 0.13, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
    shape: Annotated[str, OneOf(SHAPES)] = "spine"
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for name in ("spine", "branches"):
            chances = getattr(self, name)
            if not chances or not all(0.0 < chance < 1.0 for chance in chances):
                raise RecipeError(
                    "a chance is no probability",
                    where=f"drafter.options.{name}",
                    found=str(chances),
                    expected="numbers between 0 and 1",
                    do=f"leave {name} out to take the defaults",
                )


class Goose(NgramDrafter):
    """No weights; branches are in stores, matches and acceptances with their row."""

    family = "goose"

    @property
    def num_kept(self) -> int:
        return len(self.options.branches)

    def open(self, space: Space) -> GooseState:
        return GooseState(self, space)


class GooseState(StoredState, TrieState):
    """Per slot: an index of the text, the acceptance of each source, a store of branches."""

    def __init__(self, drafter: Goose, space: Space) -> None:
        self.options, self.device = drafter.options, space.device
        self.num_spine = len(self.options.spine)
        self.lengths = range(self.num_spine, 0, -1)
        self.stores = drafter.registry.rows(space.identity, space.num_slots)
        self.indices = [NgramIndex(self.lengths) for _ in range(space.num_slots)]
        self.rates = [self._first_rates() for _ in range(space.num_slots)]
        self._drafted = [Trie() for _ in range(space.num_slots)]

    def _first_rates(self) -> Rates:
        options = self.options
        return Rates([*options.spine, *options.branches, *options.branches])

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.stores.start(slot)
        self.indices[slot] = NgramIndex(self.lengths)
        self.indices[slot].read(tokens)
        self.rates[slot] = self._first_rates()

    def end(self, slot: int) -> None:
        super().end(slot)
        self.indices[slot] = NgramIndex(self.lengths)

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        index, store = self.indices[slot], self.stores.at(slot)
        index.read(tokens)
        found = index.match(tokens)
        spine = index.continuation(tokens, budget.depth)
        match = 0 if found is None else found[0]
        sources = _Sources(self.options, self.rates[slot], store, spine, match)
        trie = best_first(sources.children, (0 if spine else -1, tokens[-1]), budget)
        self._drafted[slot] = trie
        return trie

    def observe(self, outcome: Outcome) -> None:
        slots = outcome.view.slots
        record_round(outcome, [self._drafted[s] for s in slots], [self.rates[s] for s in slots])
        for slot in slots:
            self._drafted[slot] = Trie()
        learn_round(self.stores, outcome, LAST, keep=0.0)


@dataclass(frozen=True, slots=True)
class _Sources:
    """What one row may draft in this round, and how likely each guess is."""

    options: GooseOptions
    rates: Rates
    store: NgramStore
    spine: Sequence[int]
    match: int

    def children(self, place: Place) -> Iterable[Guess[Place]]:
        """The spine's next token first, then the branches with other tokens."""
        taken, token = place
        options, num_spine = self.options, len(self.options.spine)
        guesses: list[Guess[Place]] = []
        on_spine = 0 <= taken < len(self.spine)
        if on_spine:
            source = min(self.match + taken, num_spine) - 1
            chance, follower = self.rates.chance(source), self.spine[taken]
            guesses.append(Guess(follower, chance, (taken + 1, follower), source))
        first = num_spine if on_spine else num_spine + len(options.branches)
        for rank, found in enumerate(self.store.get((token,))):
            branch = found.ids[0]
            if not on_spine or branch != self.spine[taken]:
                chance = self.rates.chance(first + rank)
                guesses.append(Guess(branch, chance, (-1, branch), first + rank))
        if options.shape == "balanced":
            return [
                Guess(guess.token, chance, guess.place, guess.tag)
                for guess, chance in zip(guesses, options.branches, strict=False)
            ]
        return guesses


FIRST_TESTS = 4.0  # how many tests a first guess weighs, for good: no source is given up
FADE = 0.97  # what a test weighs against the next one


class Rates:
    """Running acceptance by source. One writer: the DraftState that owns it."""

    def __init__(self, first: Sequence[float]) -> None:
        self._first = tuple(first)
        self._hits, self._tests = [0.0] * len(first), [0.0] * len(first)

    def chance(self, source: int) -> float:
        hits = self._hits[source] + FIRST_TESTS * self._first[source]
        return hits / (self._tests[source] + FIRST_TESTS)

    def record(self, source: int, is_right: bool) -> None:
        self._hits[source] = FADE * self._hits[source] + is_right
        self._tests[source] = FADE * self._tests[source] + 1.0


def record_round(outcome: Outcome, drafted: Sequence[Trie], rates: Sequence[Rates]) -> None:
    """Test every guess whose parent was reached. The tries (guesses tagged with their source) and
    rates are by row; they are compared with the text that came out, whoever drafted it."""
    for b, trie in enumerate(drafted):
        if outcome.finished[b] is None:
            for children, right in trie.walk(outcome.emitted[b]):
                for child in children:
                    rates[b].record(trie.tags[child], child == right)


FAMILY = Family(
    name="goose",
    summary=(
        "No training: copies what followed the same words before, as far as such copies have been "
        "accepted lately, and hangs the target's own second choices beside each copied token. The "
        "two together are never much worse than prompt-lookup or token-recycling alone."
    ),
    paper="https://arxiv.org/abs/2604.02047",
    options=GooseOptions,
    build=Goose,
    trainable=False,
    policies=("direct",),
)
