"""Responses: finished answers of one tenant, and what followed the newest tokens in a text.

SuffixDecoding (arXiv 2411.04975, section 4) counts continuations in a suffix tree over texts. The
same counts are taken here from the texts themselves: the places where a suffix of the context
ended, filtered token by token, are the leaves below that suffix's node, and the share of them that
goes on with a token is the count of that child over the count of its parent. A text then takes
four bytes per token, where a tree takes hundreds, and dropping the oldest answer is one cut.
Letters: R flat rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from specctl.drafters.retrieval.corpus import BREAK, Ids32
from specctl.drafters.retrieval.store_registry import Guarded
from specctl.drafters.retrieval.trie import Trie

ID_BYTES = 4
MOST_PLACES = 4096  # of more places of a suffix, the newest so many are counted
SMALLEST = 256  # tokens of the first allocation

Places = npt.NDArray[np.int64]


class ResponseStore(Guarded):
    """Finished answers end to end, oldest first, a break behind each: at most `max_tokens` tokens,
    breaks counted. A new answer takes the place of the oldest ones, whole; of one that is longer
    than the store the end is kept. `ids_R` is a view that later answers may overwrite."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.is_frozen = max_tokens, False
        self._all: Ids32 = np.empty(0, dtype=np.int32)
        self._first = 0
        self.ids_R: Ids32 = self._all
        super().__init__()

    @property
    def num_bytes(self) -> int:
        """What is allocated: never more than `max_tokens` ids."""
        return int(self._all.nbytes)

    def freeze(self) -> None:
        """From now on nothing is remembered."""
        self.is_frozen = True

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer; the oldest are forgotten where it needs their place."""
        kept = answer[max(0, len(answer) - self.max_tokens + 1) :]
        if self.is_frozen or not len(kept):
            return
        new_R = np.array([*kept, BREAK], dtype=np.int32)
        with self._lock:
            self._forget(len(self.ids_R) + len(new_R) - self.max_tokens)
            last = self._first + len(self.ids_R)
            if last + len(new_R) > len(self._all):
                last = self._move(len(new_R))
            self._all[last : last + len(new_R)] = new_R
            self.ids_R = self._all[self._first : last + len(new_R)]

    def _forget(self, excess: int) -> None:
        """Drop the oldest answers that hold at least so many tokens."""
        if excess <= 0:
            return
        end_R = np.flatnonzero(self.ids_R == BREAK) + 1
        cut = int(end_R[np.searchsorted(end_R, excess)])
        self._first += cut
        self.ids_R = self.ids_R[cut:]

    def _move(self, num_new: int) -> int:
        """Bring what is kept to the front, in a larger allocation while that may grow; where it
        ends."""
        kept = len(self.ids_R)
        size = min(self.max_tokens, max(SMALLEST, 2 * (kept + num_new)))
        if size > len(self._all):
            larger: Ids32 = np.empty(size, dtype=np.int32)
            larger[:kept] = self.ids_R
            self._all = larger
        else:
            self._all[:kept] = self.ids_R
        self._first = 0
        return kept


def suffixes(ids_R: Ids32, context: Sequence[int]) -> list[tuple[int, Places]]:
    """Where the last tokens of `context` end in a text: (how many tokens, places), longest first.
    A shorter suffix that ends at the same places is left out: it has nothing to add."""
    found: list[tuple[int, Places]] = []
    at_R: Places = np.flatnonzero(ids_R == context[-1])
    for length in range(1, len(context) + 1):
        if not len(at_R):
            break
        if found and len(found[-1][1]) == len(at_R):
            found.pop()
        found.append((length, at_R))
        if length < len(context):
            at_R = at_R[at_R >= length]
            at_R = at_R[ids_R[at_R - length] == context[-1 - length]]
    return found[::-1]


def continued(
    ids_R: Ids32, places: Places, nodes: int, depth: int, least: float, branches: bool
) -> Trie:
    """What followed these places: the `nodes` most probable nodes no deeper than `depth`, with
    path probabilities of at least `least` as estimates. Without branches only the commonest token
    follows each (of equals the one seen last)."""
    trie, heap, order = Trie(), list[tuple[float, int, int, int, Places]](), count()

    def spread(parent: int, chance: float, at_R: Places) -> None:
        followers = _followers(ids_R, at_R, least / chance)
        for token, next_R in followers if branches else followers[:1]:
            share = chance * len(next_R) / len(at_R)
            heapq.heappush(heap, (-share, next(order), parent, token, next_R))

    spread(-1, 1.0, places[-MOST_PLACES:])
    while heap and len(trie) < nodes:
        share, _, parent, token, at_R = heapq.heappop(heap)
        node = trie.add(parent, token, -share)
        if trie.depths[node] < depth:
            spread(node, -share, at_R)
    return trie


def _followers(ids_R: Ids32, at_R: Places, least: float) -> list[tuple[int, Places]]:
    """The tokens behind these ascending places and where they stand, the commonest first, of equals
    the newest; those with a smaller share of all places than `least` left out, and breaks."""
    next_R = at_R[at_R < len(ids_R) - 1] + 1
    if not len(next_R):
        return []
    token_R = ids_R[next_R]
    few = least * len(at_R) - 1e-9  # shares along a path are rounded
    if (token_R == token_R[0]).all():
        groups = [(int(token_R[0]), next_R)]
    else:
        value, inverse_R, counts = np.unique(token_R, return_inverse=True, return_counts=True)
        newest = np.empty(len(value), dtype=np.int64)
        newest[inverse_R] = next_R  # ascending, so that the last one stays
        ranked = np.lexsort((-newest, -counts))
        wanted = ranked[counts[ranked] >= few]
        groups = [(int(value[i]), next_R[inverse_R == i]) for i in wanted]
    return [(token, at) for token, at in groups if token != BREAK and len(at) >= few]
