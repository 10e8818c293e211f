"""REST (arXiv 2311.08252): draft a tree of the commonest continuations found in a store of texts.

The store is a suffix array over token ids of a corpus, or of text that the target wrote. The
longest suffix of the row's text that occurs there is looked up, its continuations are counted, and
the most frequent prefixes among them become the tree. A package holds the texts; `specctl
datastore` builds one. The row's own text is searched in the same way.
Letters: R flat rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specctl.core.drafter import Budget, Family, Space
from specctl.drafters.retrieval.corpus import CorpusDrafter
from specctl.drafters.retrieval.retrieve import Reach, Retriever, indexed
from specctl.drafters.retrieval.trie import Trie, TrieState


@dataclass(frozen=True, slots=True)
class RestOptions:
    """Suffixes of `min_match` to `max_match` tokens are looked up and `span` tokens behind them
    drafted; of more than `most` places in the store so many are counted. `own`: search the row's
    own text, too."""

    min_match: int = 2
    max_match: int = 16
    span: int = 10
    most: int = 5000
    own: bool = True

    def __post_init__(self) -> None:
        assert self.reach

    @property
    def reach(self) -> Reach:
        """The same, checked."""
        return Reach(range(self.min_match, self.max_match + 1), self.span, self.most, self.own)


class Rest(CorpusDrafter):
    """No weights; a package may hold the texts of the store."""

    family = "rest"
    options: RestOptions

    def index(self) -> None:
        self.store = indexed(self.corpus_R, self.options.reach)

    def open(self, space: Space) -> RestState:
        return RestState(self, space)


class RestState(TrieState):
    """Where each slot's own text repeats itself; the store is the drafter's and read only."""

    def __init__(self, drafter: Rest, space: Space) -> None:
        self.device = space.device
        self.retriever = Retriever(drafter.options.reach, space.num_slots, drafter.store)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.retriever.start(slot, tokens)

    def end(self, slot: int) -> None:
        self.retriever.end(slot)

    def draft_row(self, slot: int, tokens: Sequence[int], budget: Budget) -> Trie:
        return self.retriever.trie(slot, tokens, budget.nodes, budget.depth)


FAMILY = Family(
    name="rest",
    summary=(
        "No training: looks the newest tokens up in a store of texts and drafts a tree of what "
        "followed them there most often. Worth its disk space where users ask for what others "
        "have written before (code, boilerplate, an in-house corpus); without a store it searches "
        "the row's own text, as a prompt lookup that drafts trees."
    ),
    paper="https://arxiv.org/abs/2311.08252",
    options=RestOptions,
    build=Rest,
    trainable=False,
    policies=("direct",),
)
