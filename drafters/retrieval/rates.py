"""How often each source of guesses has been right lately.

A guess is tested when the text reaches its parent: then the token that the target chose there says
whether it was right. Guesses that the text never reached say nothing, nor does a round that was
cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from specctl.core.drafter import Outcome
from specctl.drafters.retrieval.trie import Trie

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
    rates are by row; they are held against the text that came out, whoever drafted it."""
    for b, trie in enumerate(drafted):
        if outcome.finished[b] is None:
            for children, right in trie.walk(outcome.emitted[b]):
                for child in children:
                    rates[b].record(trie.tags[child], child == right)
