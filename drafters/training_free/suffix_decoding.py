"""SuffixDecoding (arXiv 2411.04975): draft what followed the newest tokens, here or in answers.

Two sources are searched for every suffix of the newest `max_match` tokens: the row's own text
(prompt and answer so far) and the finished answers of its tenant, which outlive their requests. A
suffix of m tokens allows `factor * m + offset` nodes, in the order of their path probabilities
(counts of continuations) down to `min_prob`. The draft with the largest sum of these, the expected
number of accepted tokens, is taken (section 4.2); of equals that of the row's own text, then the
longer suffix. The bounds are those of vLLM, which keeps answers first in, first out.

Answers are remembered only of requests that name a tenant, within `max_tokens` tokens for each of
`tenants` tenants, and drafted for the same tenant alone. What other requests have left behind
changes drafts, never a distribution, and no text at temperature 0. Nothing is written to disk;
texts that a package holds (`specctl datastore`) are a third source, for everybody.
Letters: R flat rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
from torch import Tensor

from specctl.core.drafter import Budget, Family, Space
from specctl.drafters.nets.options import SERVED
from specctl.drafters.option_checks import check_options
from specctl.drafters.retrieval.corpus import CorpusDrafter, Ids32
from specctl.drafters.retrieval.responses import ID_BYTES, ResponseStore, continued, suffixes
from specctl.drafters.retrieval.store_registry import RowStores, Scope, StoreRegistry
from specctl.drafters.retrieval.trie import Trie, TrieState


@dataclass(frozen=True, slots=True)
class SuffixDecodingOptions:
    """A match of m tokens, at most `max_match`, drafts `factor` m + `offset` nodes of path
    probability `min_prob` or more, as a tree or (`tree: false`) as the best chain. Each of the
    newest `tenants` tenants keeps answers of `max_tokens` tokens, four bytes each."""

    max_match: int = field(default=24, metadata=SERVED)
    factor: float = field(default=1.0, metadata=SERVED)
    offset: int = field(default=0, metadata=SERVED)
    min_prob: float = field(default=0.1, metadata=SERVED)
    tree: bool = field(default=True, metadata=SERVED)
    max_tokens: int = field(default=262_144, metadata=SERVED)
    tenants: int = field(default=16, metadata=SERVED)

    def __post_init__(self) -> None:
        names = ("max_match", "max_tokens", "tenants")
        is_right = self.max_match >= 1 and self.max_tokens >= 2 and self.tenants >= 1
        check_options(self, is_right, names, "max_match and tenants from 1, max_tokens from 2")
        is_right = min(self.factor, self.offset) >= 0 < self.factor + self.offset < float("inf")
        check_options(self, is_right, ("factor", "offset"), "factor or offset above 0, finite")
        check_options(self, 0 < self.min_prob <= 1, ("min_prob",), "a probability above 0")


class SuffixDecoding(CorpusDrafter):
    """No weights; the answers of tenants, and perhaps a package's texts."""

    family = "suffix-decoding"
    max_tokens: ClassVar[int] = 2_000_000  # searched whole in every round
    options: SuffixDecodingOptions
    _registry: StoreRegistry[ResponseStore] | None = None

    @property
    def shared_bytes(self) -> int:
        return self.options.tenants * self.options.max_tokens * ID_BYTES

    @property
    def registry(self) -> StoreRegistry[ResponseStore]:
        """The answers of every tenant, by its name. A row without one is alone."""
        if self._registry is None:  # options may be set between loading and the first round
            new = partial(ResponseStore, self.options.max_tokens)
            most = self.options.tenants
            self._registry = StoreRegistry(Scope.CONVERSATION, new, most=most)
        return self._registry

    def open(self, space: Space) -> SuffixDecodingState:
        return SuffixDecodingState(self, space)


class _RowText:
    """A row's tokens as an array that grows. One writer: the DraftState."""

    def __init__(self) -> None:
        self._all: Ids32 = np.empty(256, dtype=np.int32)
        self.ids_R: Ids32 = self._all[:0]

    def read(self, tokens: Sequence[int]) -> None:
        """Take in what is new of the whole text."""
        known, size = len(self.ids_R), len(tokens)
        if size > len(self._all):
            larger: Ids32 = np.empty(2 * size, dtype=np.int32)
            larger[:known] = self.ids_R
            self._all = larger
        self._all[known:size] = tokens[known:]
        self.ids_R = self._all[:size]


class SuffixDecodingState(TrieState):
    """Each slot's own text, and the store of its tenant."""

    def __init__(self, drafter: SuffixDecoding, space: Space) -> None:
        self.drafter, self.device = drafter, space.device
        self.texts = [_RowText() for _ in range(space.num_slots)]
        self.stores: RowStores[ResponseStore] = drafter.registry.rows(
            space.identity, space.num_slots
        )

    def belong(self, slot: int, tenant: str | None) -> None:
        self.stores.join(slot, tenant)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.stores.start(slot)
        self.texts[slot] = _RowText()
        self.texts[slot].read(tokens)

    def finish(self, slot: int, answer: Sequence[int]) -> None:
        self.stores.at(slot).add(answer)

    def end(self, slot: int) -> None:
        self.stores.end(slot)
        self.texts[slot] = _RowText()

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        self.texts[slot].read(tokens)
        options = self.drafter.options
        context = list(tokens[-options.max_match :])
        best, best_score = Trie(), 0.0
        for ids_R, searched_R in self._sources(slot):
            for length, places in suffixes(searched_R, context):
                nodes = min(int(options.factor * length) + options.offset, budget.nodes)
                if nodes <= best_score:  # a score is at most the number of nodes
                    break
                bounds = nodes, budget.depth, options.min_prob, options.tree
                trie = continued(ids_R, places, *bounds)
                if (score := sum(trie.estimates)) > best_score:
                    best, best_score = trie, score
        return best

    def _sources(self, slot: int) -> Iterator[tuple[Ids32, Ids32]]:
        """Texts, each with the part of it in which a match may end."""
        own_R, known_R = self.texts[slot].ids_R, self.stores.at(slot).ids_R
        yield own_R, own_R[:-1]  # the newest token matches itself
        yield known_R, known_R
        yield self.drafter.corpus_R, self.drafter.corpus_R


FAMILY = Family(
    name="suffix-decoding",
    summary=(
        "No training: remembers finished answers, apart for each tenant and within a bound, and "
        "drafts the most probable continuations of the newest tokens there and in the row's own "
        "text. For agents and loops that write again what they have written before; without a "
        "tenant it searches the row's own text alone."
    ),
    paper="https://arxiv.org/abs/2411.04975",
    options=SuffixDecodingOptions,
    build=SuffixDecoding,
    trainable=False,
    policies=("direct",),
)
