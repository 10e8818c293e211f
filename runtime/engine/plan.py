"""Before a round's draft: how much each row may draft.

What is decided here follows from earlier rounds only. A length that looked at this round's drafts
would bias what is emitted (non-anticipation).

Under most rules what a sampled row emits depends on its drafts. Its draft must then be the one that
it would have alone, however much room the rows beside it have: trees are grown as deep as the
policy goes and cut to the row's own room (a chain's beginning is the shorter chain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specctl.core.drafter import Budget
from specctl.core.tree import DraftTree
from specctl.runtime.batching.base import Batching, RowView
from specctl.runtime.engine.request import Row
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.length import LengthChooser


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The budget of a round's trees, and the length of every row where a batch policy decides."""

    budget: Budget
    lengths: tuple[int, ...] | None = None

    def drafts(self, b: int) -> bool:
        """Whether row b drafts at all."""
        return self.budget.depth > 0 and (self.lengths is None or self.lengths[b] > 0)

    def cut(self, tree: DraftTree) -> DraftTree:
        """The tree without what lies beyond its row's own length."""
        if self.lengths is None:
            return tree
        return tree.within(torch.tensor(self.lengths, device=tree.token_BN.device))

    def of_rows(self, at: Sequence[int]) -> RoundPlan:
        """The plan of some rows only."""
        lengths = self.lengths
        return RoundPlan(self.budget, None if lengths is None else tuple(lengths[b] for b in at))


@dataclass(frozen=True, slots=True)
class RoundPlanner:
    """Asks who may shorten drafts: the length chooser for the round, the batch policy by row.
    `follows_drafts`: what sampled rows emit depends on what was drafted for them."""

    context: int
    policy: Policy
    chooser: LengthChooser | None
    batching: Batching | None
    follows_drafts: bool

    def plan(self, rows: Sequence[Row]) -> RoundPlan:
        """No row drafts what it has no room for: its last token is the bonus."""
        rooms = self._rooms(rows)
        most, lengths = max(*rooms, 0), None
        depth = self.policy.depth
        if self.chooser is not None:
            depth = min(depth, self.chooser.length(len(rows)))
        if self.batching is not None:
            lengths = self.batching.lengths(self._views(rows, rooms))
            depth = min(depth, max(lengths))
        elif self._is_cut(rows) and min(rooms) < depth:
            lengths = tuple(max(0, min(depth, room)) for room in rooms)
        if most == 0 or lengths is None or self.policy.is_chain:
            depth = min(depth, most)
        return RoundPlan(Budget(nodes=self.policy.nodes, depth=depth), lengths)

    def _is_cut(self, rows: Sequence[Row]) -> bool:
        """Whether every row is cut to its own room."""
        return self.follows_drafts and not all(row.request.sampling.greedy for row in rows)

    def would_draft(self, rows: Sequence[Row]) -> bool:
        """Whether any of these rows may be expected to draft."""
        if self.batching is None:
            return True
        return self.batching.would_draft(self._views(rows, self._rooms(rows)))

    def _rooms(self, rows: Sequence[Row]) -> list[int]:
        return [min(row.room, self.context - len(row.tokens)) - 1 for row in rows]

    def _views(self, rows: Sequence[Row], rooms: Sequence[int]) -> list[RowView]:
        pairs = zip(rows, rooms, strict=True)
        return [RowView(row.index, room, row.speculates, row.backlog) for row, room in pairs]
