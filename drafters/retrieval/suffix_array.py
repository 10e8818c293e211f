"""Suffix array over a corpus: every place where some tokens occur, and what followed there.

Suffixes are sorted by their first `reach` tokens, which is all that retrieval reads, so prefix
doubling (Manber and Myers 1990) stops after log2(reach) sorts. The suffixes that begin with a
pattern stand side by side and in order, so that continuations are counted without a loop over
them.
Letters: C candidates, P path, R flat rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specctl.drafters.retrieval.corpus import BREAK, Ids32
from specctl.drafters.retrieval.trie import Trie

_BYTES = 4  # of one id


def suffix_order(ids_R: Ids32, reach: int) -> Ids32:
    """Places of the corpus, sorted by the `reach` tokens that begin there (breaks last)."""
    size = len(ids_R)
    rank_R = np.unique(ids_R.view(np.uint32), return_inverse=True)[1].astype(np.int64) + 1
    order_R, width = np.argsort(rank_R, kind="stable"), 1
    while width < reach and size:
        behind_R = np.zeros(size, dtype=np.int64)
        behind_R[:-width] = rank_R[width:] if width < size else 0
        key_R = rank_R * (size + 1) + behind_R
        order_R = np.argsort(key_R, kind="stable")
        sorted_R = key_R[order_R]
        rank_R = np.empty(size, dtype=np.int64)
        rank_R[order_R] = np.concatenate([[1], 1 + np.cumsum(sorted_R[1:] != sorted_R[:-1])])
        width *= 2
    return order_R.astype(np.int32)


@dataclass(frozen=True, slots=True)
class SuffixRange:
    """Suffixes first to last - 1 of the array begin with the last `length` tokens of a text."""

    first: int
    last: int
    length: int


class SuffixArray:
    """Read only. Patterns and continuations together may be `reach` tokens long."""

    def __init__(self, ids_R: Ids32, reach: int) -> None:
        self.ids_R, self.reach = ids_R, reach
        self.order_R = suffix_order(ids_R, reach)
        self._bytes = ids_R.view(np.uint32).astype(">u4").tobytes()

    def find(self, pattern: Sequence[int]) -> SuffixRange:
        """All places of these tokens; first == last where there are none."""
        wanted = np.array(pattern, dtype=">u4").tobytes()

        def begins(place: int) -> bytes:
            return self._bytes[_BYTES * place : _BYTES * place + len(wanted)]

        first = bisect_left(self.order_R, wanted, key=begins)
        return SuffixRange(
            first, bisect_right(self.order_R, wanted, lo=first, key=begins), len(pattern)
        )

    def longest(self, tokens: Sequence[int], lengths: range) -> SuffixRange | None:
        """The places of the longest suffix of `tokens` (of these ascending lengths) that occurs.
        A suffix of what occurs occurs, too: the length is found by halving."""
        low, high = 0, min(len(lengths), max(0, len(tokens) - lengths.start + 1))
        best = None
        while low < high:
            middle = (low + high) // 2
            found = self.find(tokens[len(tokens) - lengths[middle] :])
            if found.first < found.last:
                best, low = found, middle + 1
            else:
                high = middle
        return best

    def trie(self, places: SuffixRange, span: int, nodes: int, most: int) -> Trie:
        """The `nodes` most frequent prefixes of what followed, up to `span` tokens; estimates are
        shares. Of more than `most` places, so many evenly spaced ones are counted."""
        count = min(most, places.last - places.first)
        pick_C = np.linspace(places.first, places.last - 1, count).astype(np.int64)
        at_CP = self.order_R[pick_C, None].astype(np.int64) + places.length + np.arange(span)
        ids_CP = np.where(
            at_CP < len(self.ids_R), self.ids_R[np.minimum(at_CP, len(self.ids_R) - 1)], BREAK
        )
        return _frequent(ids_CP, nodes)


def _frequent(ids_CP: npt.NDArray[np.int32], nodes: int) -> Trie:
    """The most frequent prefixes of rows that are in order; nothing goes on behind a break."""
    C, span = ids_CP.shape
    is_new_CP = np.ones((C, span), dtype=bool)
    is_new_CP[1:] = np.logical_or.accumulate(ids_CP[1:] != ids_CP[:-1], axis=1)
    is_text_CP = np.logical_and.accumulate(ids_CP != BREAK, axis=1)
    table = []
    for depth in range(span):
        first = np.flatnonzero(is_new_CP[:, depth])
        size = np.diff(np.append(first, C))
        fits = is_text_CP[first, depth]
        level = np.full(int(fits.sum()), depth)
        table.append(np.stack([level, first[fits], size[fits]]))
    level_R, first_R, size_R = np.concatenate(table, axis=1)
    best = np.lexsort((first_R, level_R, -size_R))[:nodes]
    trie = Trie()
    at: dict[tuple[int, int], int] = {}
    for depth, first, size in zip(
        level_R[best].tolist(), first_R[best].tolist(), size_R[best].tolist(), strict=True
    ):
        parent = -1
        if depth:  # the row that its parent's run begins with
            above = np.flatnonzero(is_new_CP[: first + 1, depth - 1])[-1]
            parent = at[depth - 1, int(above)]
        at[depth, first] = trie.add(parent, int(ids_CP[first, depth]), size / C)
    return trie
