"""Suffix array over a corpus: every place where some tokens occur, and what followed there.

Suffixes are sorted by their first `reach` tokens, which is all that retrieval reads, so prefix
doubling (Manber and Myers 1990) stops after log2(reach) sorts. The suffixes that begin with a
pattern stand side by side and in order, so that continuations are counted without a loop over
them. Letters: N corpus tokens, R continuations, L tokens of each.
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


def suffix_order(ids_N: Ids32, reach: int) -> Ids32:
    """Places of the corpus, sorted by the `reach` tokens that begin there (breaks last)."""
    size = len(ids_N)
    rank_N = np.unique(ids_N.view(np.uint32), return_inverse=True)[1].astype(np.int64) + 1
    order_N, width = np.argsort(rank_N, kind="stable"), 1
    while width < reach and size:
        behind_N = np.zeros(size, dtype=np.int64)
        behind_N[:-width] = rank_N[width:] if width < size else 0
        key_N = rank_N * (size + 1) + behind_N
        order_N = np.argsort(key_N, kind="stable")
        sorted_N = key_N[order_N]
        rank_N = np.empty(size, dtype=np.int64)
        rank_N[order_N] = np.concatenate([[1], 1 + np.cumsum(sorted_N[1:] != sorted_N[:-1])])
        width *= 2
    return order_N.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Places:
    """Suffixes first to last - 1 of the array begin with the last `length` tokens of a text."""

    first: int
    last: int
    length: int


class SuffixArray:
    """Read only. Patterns and continuations together may be `reach` tokens long."""

    def __init__(self, ids_N: Ids32, reach: int) -> None:
        self.ids_N, self.reach = ids_N, reach
        self.order_N = suffix_order(ids_N, reach)
        self._bytes = ids_N.view(np.uint32).astype(">u4").tobytes()

    def find(self, pattern: Sequence[int]) -> Places:
        """All places of these tokens; first == last where there are none."""
        wanted = np.array(pattern, dtype=">u4").tobytes()

        def begins(place: int) -> bytes:
            return self._bytes[_BYTES * place : _BYTES * place + len(wanted)]

        first = bisect_left(self.order_N, wanted, key=begins)
        return Places(first, bisect_right(self.order_N, wanted, lo=first, key=begins), len(pattern))

    def longest(self, tokens: Sequence[int], lengths: range) -> Places | None:
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

    def trie(self, places: Places, span: int, nodes: int, most: int) -> Trie:
        """The `nodes` most frequent prefixes of what followed, up to `span` tokens; estimates are
        shares. Of more than `most` places, so many evenly spaced ones are counted."""
        count = min(most, places.last - places.first)
        pick_R = np.linspace(places.first, places.last - 1, count).astype(np.int64)
        at_RL = self.order_N[pick_R, None].astype(np.int64) + places.length + np.arange(span)
        ids_RL = np.where(
            at_RL < len(self.ids_N), self.ids_N[np.minimum(at_RL, len(self.ids_N) - 1)], BREAK
        )
        return _frequent(ids_RL, nodes)


def _frequent(ids_RL: npt.NDArray[np.int32], nodes: int) -> Trie:
    """The most frequent prefixes of rows that are in order; nothing goes on behind a break."""
    R, span = ids_RL.shape
    is_new_RL = np.ones((R, span), dtype=bool)
    is_new_RL[1:] = np.logical_or.accumulate(ids_RL[1:] != ids_RL[:-1], axis=1)
    is_text_RL = np.logical_and.accumulate(ids_RL != BREAK, axis=1)
    table = []
    for depth in range(span):
        first = np.flatnonzero(is_new_RL[:, depth])
        size = np.diff(np.append(first, R))
        fits = is_text_RL[first, depth]
        level = np.full(int(fits.sum()), depth)
        table.append(np.stack([level, first[fits], size[fits]]))
    level_M, first_M, size_M = np.concatenate(table, axis=1)
    best = np.lexsort((first_M, level_M, -size_M))[:nodes]
    trie = Trie()
    at: dict[tuple[int, int], int] = {}
    for depth, first, size in zip(
        level_M[best].tolist(), first_M[best].tolist(), size_M[best].tolist(), strict=True
    ):
        parent = -1
        if depth:  # the row that its parent's run begins with
            above = np.flatnonzero(is_new_RL[: first + 1, depth - 1])[-1]
            parent = at[depth - 1, int(above)]
        at[depth, first] = trie.add(parent, int(ids_RL[first, depth]), size / R)
    return trie
