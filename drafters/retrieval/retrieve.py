"""Retrieval of continuations: from a store of given texts, and from the row's own text.

Both answer the longest match of the newest tokens only (He et al., REST, arXiv 2311.08252): what
followed its places is counted into a trie, whose estimates are the shares of those continuations.
A match of m tokens is trusted to m / (m + 1), the rule of succession.
Letters: R flat rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.core.errors import RecipeError
from specctl.drafters.retrieval.corpus import Ids32
from specctl.drafters.retrieval.occurrences import Occurrences, copied, matched
from specctl.drafters.retrieval.suffix_array import SuffixArray
from specctl.drafters.retrieval.trie import Trie, counted

OWN, STORE = 1, 2  # tags of nodes


@dataclass(frozen=True, slots=True)
class Reach:
    """Which suffixes are looked for (their lengths, ascending), how much behind them is drafted,
    how many places are counted at most, and whether the row's own text is searched, too."""

    lengths: range
    span: int
    most: int
    own: bool

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths.start < 1 or self.span < 1 or self.most < 1:
            raise RecipeError(
                "nothing would be retrieved",
                where="drafter.options",
                found=f"matches of {self.lengths.start} to {self.longest}, span {self.span}, "
                f"most {self.most}",
                expected="1 <= min_match <= max_match, span and most at least 1",
                do="leave them out to take the defaults",
            )

    @property
    def longest(self) -> int:
        return self.lengths.stop - 1


def indexed(corpus_R: Ids32, reach: Reach) -> SuffixArray | None:
    """A corpus ready for that retrieval; None of an empty one."""
    return SuffixArray(corpus_R, reach.longest + reach.span) if len(corpus_R) else None


class Retriever:
    """The places of one engine's rows. One writer: the DraftState that owns it."""

    def __init__(self, reach: Reach, num_slots: int, store: SuffixArray | None) -> None:
        self.reach, self.store = reach, store
        self._own = [Occurrences(reach.lengths.start) for _ in range(num_slots)]

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        """A row starts: nothing is left of the one before it."""
        self.end(slot)
        if self.reach.own:
            self._own[slot].read(tokens)

    def end(self, slot: int) -> None:
        self._own[slot] = Occurrences(self.reach.lengths.start)

    def trie(self, slot: int, tokens: Sequence[int], nodes: int, depth: int) -> Trie:
        """What followed the newest tokens of that row elsewhere, with the chances of it."""
        span, trie = min(self.reach.span, depth), Trie()
        if span < 1:
            return trie
        if self.reach.own:
            self._own[slot].read(tokens)
            trie = self._from_own(self._own[slot], tokens, span)
        places = None if self.store is None else self.store.longest(tokens, self.reach.lengths)
        if self.store is not None and places is not None:
            found = self.store.trie(places, span, nodes, self.reach.most)
            trie.absorb(found, _trust(places.length), STORE)
        return trie

    def _from_own(self, index: Occurrences, tokens: Sequence[int], span: int) -> Trie:
        places = index.of_suffix(tokens)
        if not places:
            return Trie()
        lengths = [matched(tokens, end, self.reach.longest) for end in places]
        longest = max(lengths)
        ends = [end for end, length in zip(places, lengths, strict=True) if length == longest]
        return counted([copied(tokens, end, span) for end in ends], _trust(longest), OWN)


def _trust(length: int) -> float:
    return length / (length + 1)
