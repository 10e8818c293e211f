"""TETRIS: a batch has so many drafted tokens a round, and they go where they are likeliest to be of
use (Wu et al., "TETRIS: optimal draft token selection for batch speculative decoding", ACL 2025).

Where no row is sampled, every row drafts as deep as it may, and of all drafted tokens the
`capacity` ones whose draft probabilities, multiplied down to them, are largest are verified (the
paper's algorithm 1). Products fall along a path, so the best set holds whole prefixes.

That choice looks at the draft. Of tokens that were drawn it would bias what is emitted under every
rule that verifies sampled drafts; so where a row is sampled, chances come from earlier rounds: the
(row, depth) with the highest chance alpha_r^depth to be reached are drafted, found by a heap of the
rows' next depths.
Letters: B rows, N nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.tree import DraftTree, NodeKind, fitted
from specctl.runtime.batching.base import BatchingEntry, RowView
from specctl.runtime.batching.history import History


@dataclass(slots=True)
class Tetris:
    """At most `capacity` drafted tokens a round, at most `longest` of one row."""

    capacity: int = 32
    longest: int = 8
    history: History = field(default_factory=History)
    _chooses: bool = False  # in this round
    _alphas: list[float] = field(default_factory=list)

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        self._alphas = [self.history.alpha(row.index) for row in rows]
        self._chooses = self.capacity > 0 and all(row.greedy for row in rows)
        rooms = [row.at_most(self.longest) for row in rows]
        if self._chooses:
            return self.history.ask(rows, rooms)
        return self.history.ask(rows, shares(self._alphas, rooms, self.capacity))

    def chosen(self, tree: DraftTree) -> DraftTree:
        """The `capacity` likeliest nodes; by earlier rounds where a draft names no chances."""
        if not self._chooses or tree.kind is not NodeKind.POINT or not tree.num_nodes:
            return tree
        chance_BN = tree.estimate_BN
        if chance_BN is None:
            alpha_B1 = torch.tensor(self._alphas, device=tree.token_BN.device)[:, None]
            chance_BN = alpha_B1 ** tree.depth_BT()[:, 1:]
        chance_BN = chance_BN.masked_fill(~tree.valid_BN, -1.0)
        by_node = chance_BN.T.flatten()  # parents in front of their children, where chances tie
        at = by_node.sort(descending=True, stable=True).indices[: self.capacity]
        taken = torch.zeros_like(by_node, dtype=torch.bool).index_fill(0, at, True)
        valid_BN = tree.valid_BN & taken.view(chance_BN.T.shape).T
        return fitted(replace(tree, valid_BN=valid_BN))

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        return min(self.capacity, self.longest) > 0

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        if self._chooses:
            tree = outcome.tree
            depth_BN = tree.depth_BT()[:, 1:].masked_fill(~tree.valid_BN, 0)
            self.history.narrow([max(row, default=0) for row in depth_BN.tolist()])
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
