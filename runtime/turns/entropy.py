"""Entropy adaptive decoding (arXiv 2502.06833): the large model writes where the text is unsure.

The entropy of the distribution that every token was chosen from, in bits and before temperature and
truncation, is averaged over the last `window` tokens, whoever wrote them. Above the `threshold` the
large model goes on, else the small one, but no sooner than `dwell` tokens after the models changed.
The large one begins. A model reads what the other wrote, in chunks, when it is its turn again: this
saves the large model's steps, and is why turns should not be short. With a threshold below 0 the
large model writes everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from statistics import fmean

from specctl.runtime.engine.request import Emission, Row
from specctl.runtime.turns.base import Turns


class EntropyGate:
    """Who writes the next token of one text."""

    def __init__(self, threshold: float, window: int, dwell: int) -> None:
        self.threshold, self.dwell = threshold, dwell
        self.is_large = True
        self._recent = deque[float](maxlen=window)
        self._num_since = 0  # tokens since the models changed

    def changes(self, bits: float) -> bool:
        """Whether, behind a token of a distribution with this entropy, the other model goes on."""
        self._recent.append(bits)
        self._num_since += 1
        wants_large = fmean(self._recent) > self.threshold
        if wants_large == self.is_large or self._num_since < self.dwell:
            return False
        self.is_large, self._num_since = wants_large, 0
        return True


class EntropyTurns(Turns):
    """Turns by the entropy of whoever writes."""

    def rounds(self, row: Row) -> Iterator[tuple[int, ...]]:
        threshold, window, dwell = self.mixture.numbers
        gate = EntropyGate(threshold, int(window), int(dwell))
        while row.finished is None:
            began, is_large = row.num_new, gate.is_large
            turn = self.write(self.large if is_large else self.small, row)
            with closing(turn):
                for emission in turn:
                    yield self.extend(row, emission, until_change(gate, emission))
                    if row.finished is not None or gate.is_large != is_large:
                        break
            self.counts.count(row.num_new - began, is_large)


def until_change(gate: EntropyGate, emission: Emission) -> int:
    """How many of these tokens stand: behind a change the other model writes. When it comes follows
    from the text in front of it, so cutting there leaves the drafted tokens' distribution."""
    assert emission.logprobs is not None, "turns are written with log-probabilities"
    for at, one in enumerate(emission.logprobs):
        if gate.changes(one.entropy):
            return at + 1
    return len(emission.tokens)
