"""TETRIS: a batch has so many drafted tokens a round, and they go where they are likeliest to be of
use (Wu et al., "TETRIS: optimal draft token selection for batch speculative decoding", ACL 2025).

Of all (row, depth) the `capacity` ones with the highest chance alpha_r^depth to be reached are
drafted. Chances fall along a row, so a heap of the rows' next depths finds the best set, and whole
prefixes. The paper takes the drafted tokens' own probabilities for chances. That choice looks at
the draw, and biases what is emitted under every rule that verifies sampled drafts; it is not to be
had here: chances come from earlier rounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.runtime.batching.base import BatchingEntry, RowView
from specctl.runtime.batching.history import History


@dataclass(slots=True)
class Tetris:
    """At most `capacity` drafted tokens a round, at most `longest` of one row."""

    capacity: int = 32
    longest: int = 8
    history: History = field(default_factory=History)

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        alphas = [self.history.alpha(row.index) for row in rows]
        rooms = [row.at_most(self.longest) for row in rows]
        return self.history.ask(rows, shares(alphas, rooms, self.capacity))

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        return min(self.capacity, self.longest) > 0

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.history.observe(outcome)

    def to_json(self) -> Mapping[str, Any]:
        acceptance = round(self.history.mean, 4)
        return {"batching": "tetris", "capacity": self.capacity, "acceptance": acceptance}


def shares(alphas: Sequence[float], rooms: Sequence[int], capacity: int) -> list[int]:
    """How deep every row drafts: the set of `capacity` nodes with most expected acceptances."""
    found = [0] * len(alphas)
    heap = [(-alpha, r) for r, (alpha, room) in enumerate(zip(alphas, rooms, strict=True)) if room]
    heapq.heapify(heap)
    while heap and capacity > 0:
        chance, r = heapq.heappop(heap)
        found[r] += 1
        capacity -= 1
        if found[r] < rooms[r]:
            heapq.heappush(heap, (chance * alphas[r], r))
    return found


BATCHING = BatchingEntry(
    "tetris",
    "so many drafted tokens a round, where they are of most use",
    "https://arxiv.org/abs/2502.15197",
    lambda depth, costs, **given: Tetris(longest=depth, **given),
    setting="capacity",
)
