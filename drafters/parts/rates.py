"""How often each source of guesses has been right lately.

A node is tested when the path reaches its parent: then the token that the target chose there says
whether it was right. Nodes that the path never reached say nothing, nor does a round that was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from specctl.drafters.parts.base import Outcome
from specctl.drafters.parts.trie import Trie

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
    """Test every drafted node whose parent was reached: the tries hold the nodes of the tree, in
    its order, tagged with their source. Tries and rates by row."""
    paths, last = outcome.path_BP.tolist(), outcome.next_token_B.tolist()
    for b, trie in enumerate(drafted):
        if outcome.finished[b] is not None:
            continue
        path = [fed - 1 for fed in paths[b] if fed >= 0]
        chosen = dict(zip(path, [*(trie.tokens[n] for n in path[1:]), last[b]], strict=True))
        for node, parent in enumerate(trie.parents):
            if parent in chosen:
                rates[b].record(trie.tags[node], trie.tokens[node] == chosen[parent])
