"""Hierarchy Drafting (arXiv 2502.05609): databases asked in the order of their temporal locality.

    W  context: spans of this text, prompt and answer, the newest first
    S  model: spans that the target itself has written, the most frequent first
    L  statistics: spans of a corpus, the most frequent first

A span is `span` tokens and its key the `previous` tokens in front of it, or fewer. The databases
are asked in `order` until `guesses` distinct spans are found, so a lower one is asked only where a
higher one comes up short; shorter answers are left short. Spans with equal beginnings become one
path of the tree. The paper fills W with the by-products of a Jacobi window as well; here it holds
what was really written. S and L come with the drafter (`specctl datastore` or `count_spans` build
them, a package holds them) and are not written while drafting; without an S, the answers of the
rows are counted, as `scope` allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specctl.core.drafter import Budget, Drafter, Family, Outcome, Space
from specctl.core.errors import FileError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.option_checks import check_options
from specctl.drafters.retrieval.store import Ids, NgramStore, NgramStores, StoreLimits
from specctl.drafters.retrieval.store_registry import Scope, StoredState
from specctl.drafters.retrieval.trie import Trie, TrieState
from specctl.drafters.states.ngram_distributions import learning_scope

LEVELS = "WSL"
BUILT_MIB = 512
FILES = {"S": "model.", "L": "statistics."}


@dataclass(frozen=True, slots=True)
class HierarchyOptions:
    """`guesses` spans of `span` tokens, looked up by up to `previous` tokens, from the databases in
    `order` (some letters of WSL). `scope` says whose answers S counts where it did not come with
    the drafter (request, conversation, process); W is the row's own in every scope. `learns`: which
    database `specctl datastore` fills, L or S. `max_mib` caps each database that is written while
    drafting; S and L as built have 512 MiB at most."""

    span: int = 4
    guesses: int = 7
    previous: int = 2
    order: str = LEVELS
    scope: str = Scope.REQUEST
    learns: str = "L"
    max_mib: int = 32

    def __post_init__(self) -> None:
        known = set(self.order) <= set(LEVELS) and len(set(self.order)) == len(self.order)
        if not self.order or not known:
            raise RecipeError(
                "this is no order of databases",
                where="drafter.options.order",
                found=self.order,
                expected="some of the letters W (context), S (model), L (statistics), each once",
                do="write order: WSL",
            )
        if self.learns not in FILES:
            raise RecipeError(
                "this database is not built beforehand",
                where="drafter.options.learns",
                found=self.learns,
                expected="S (answers of the target) or L (a corpus)",
                do="write learns: L",
            )
        is_right = min(self.span, self.guesses, self.previous) >= 1
        check_options(self, is_right, ("span", "guesses", "previous"), "positive numbers")


class Hierarchy(Drafter):
    """No weights; `offline` holds S and L, where they were built."""

    family = "hierarchy"
    holds_data = True

    def __init__(
        self, options: HierarchyOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.offline: dict[str, NgramStore] = {}
        self.limits = StoreLimits(options.max_mib << 20, options.guesses)
        self.built = replace(self.limits, max_bytes=BUILT_MIB << 20)
        self.registry = NgramStores(learning_scope(options.scope), self.limits)

    def open(self, space: Space) -> HierarchyState:
        return HierarchyState(self, space)

    def count_spans(self, level: str, texts: Iterable[Sequence[int]]) -> None:
        """Fill S (with answers of the target) or L (with a corpus) from token ids."""
        assert level in FILES, level
        store = self.offline.setdefault(level, NgramStore(self.built))
        for text in texts:
            read_spans(store, text, 0, self.options)

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Build the database that `learns` names from these texts alone."""
        self.offline.pop(self.options.learns, None)
        self.count_spans(self.options.learns, texts)

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for level, store in self.offline.items():
            found |= store.tensors(FILES[level])
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        known = {level: prefix for level, prefix in FILES.items() if prefix + "ids" in tensors}
        strange = [name for name in tensors if not name.startswith(tuple(known.values()))]
        if strange:
            raise FileError(
                "this is no database of hierarchy drafting",
                found=", ".join(strange[:4]),
                expected="tensors named " + " or ".join(prefix + "*" for prefix in FILES.values()),
                do="use a package made by this family",
            )
        for level, prefix in known.items():
            self.offline[level] = NgramStore.from_tensors(tensors, self.built, prefix)


class HierarchyState(StoredState, TrieState):
    """Per slot: the context database and how much of the text it has read. `right` counts the
    right guesses by the first database that made them."""

    def __init__(self, drafter: Hierarchy, space: Space) -> None:
        self.options, self.device, self.offline = drafter.options, space.device, drafter.offline
        self.stores = drafter.registry.rows(space.identity, space.num_slots)
        self.newest = StoreLimits(drafter.limits.max_bytes, drafter.limits.per_key, True)
        self.context = [NgramStore(self.newest) for _ in range(space.num_slots)]
        self.num_read = [0] * space.num_slots
        self.prompt_end = [0] * space.num_slots
        self.right = dict.fromkeys(self.options.order, 0)
        self._drafted = [Trie() for _ in range(space.num_slots)]

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.stores.start(slot)
        self.context[slot] = NgramStore(self.newest)
        self.num_read[slot], self.prompt_end[slot] = 0, len(tokens)

    def end(self, slot: int) -> None:
        super().end(slot)
        self.context[slot] = NgramStore(self.newest)

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        self._read(slot, tokens)
        trie = Trie()
        for source, span in self.spans(slot, tokens):
            trie.add_path(span, [1.0] * len(span), 1 << source)
        self._drafted[slot] = trie
        return trie

    def _read(self, slot: int, tokens: Sequence[int]) -> None:
        """New spans of the text join W; those of the answer alone are counted in S."""
        first = self.num_read[slot]
        read_spans(self.context[slot], tokens, first, self.options)
        if "S" not in self.offline:
            answer = max(first, self.prompt_end[slot])
            read_spans(self.stores.at(slot), tokens, answer, self.options)
        self.num_read[slot] = max(first, len(tokens) - self.options.span + 1)

    def spans(self, slot: int, tokens: Sequence[int]) -> Iterator[tuple[int, Ids]]:
        """The guesses, best first, each with the place of its database in `order`."""
        level_of = {"W": self.context[slot], "S": self.stores.at(slot), **self.offline}
        seen: set[Ids] = set()
        for source, level in enumerate(self.options.order):
            store = level_of.get(level)
            for length in range(min(self.options.previous, len(tokens)), 0, -1):
                key = tuple(tokens[len(tokens) - length :])
                found = [each.ids for each in store.get(key)] if store is not None else []
                if level == "W":
                    found = [*self._unfinished(slot, tokens, key), *found]
                for span in found:
                    if len(seen) == self.options.guesses:
                        return
                    if span not in seen:
                        seen.add(span)
                        yield source, span

    def _unfinished(self, slot: int, tokens: Sequence[int], key: Ids) -> Iterator[Ids]:
        """What followed the key where the text ends before the span does, the newest first."""
        for at in range(len(tokens) - 1, max(self.num_read[slot], len(key)) - 1, -1):
            if tuple(tokens[at - len(key) : at]) == key:
                yield tuple(tokens[at:])

    def observe(self, outcome: Outcome) -> None:
        for slot, text in zip(outcome.view.slots, outcome.emitted, strict=True):
            trie, self._drafted[slot] = self._drafted[slot], Trie()
            for _, right in trie.walk(text):
                if right is not None:
                    tag = trie.tags[right]
                    self.right[self.options.order[(tag & -tag).bit_length() - 1]] += 1


def read_spans(
    store: NgramStore, tokens: Sequence[int], first: int, options: HierarchyOptions
) -> None:
    """Add the whole spans that begin at `first` or later, under the tokens in front of them."""
    for at in range(max(first, 1), len(tokens) - options.span + 1):
        span = tuple(tokens[at : at + options.span])
        for length in range(1, min(options.previous, at) + 1):
            store.add(tuple(tokens[at - length : at]), span)


FAMILY = Family(
    name="hierarchy",
    summary=(
        "No training: looks for what may come next first in this text, then in what the target has "
        "written before, then in a corpus, and drafts several continuations at once. For a service "
        "whose answers resemble each other, with databases built from its own logs."
    ),
    paper="https://arxiv.org/abs/2502.05609",
    options=HierarchyOptions,
    build=Hierarchy,
    trainable=False,
    policies=("direct",),
)
