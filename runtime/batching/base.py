"""What decides how long every row of a batch drafts: `Batching`, and what it is shown.

The engine asks once a round, before anything is drafted, and reports the round behind it. A length
therefore follows from earlier rounds only, never from a token that this round draws, so that it is
lossless under every verification rule (non-anticipation). A round costs what its deepest row costs:
shorter rows are padded to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.tree import DraftTree


@dataclass(frozen=True, slots=True)
class RowView:
    """A live row at the start of a round. `index` names its request for as long as it lives;
    `room` is how many drafted tokens it could still use (its own limit and the context, less the
    bonus token); `speculates` is False where its drafter failed or none is wanted; its drafter has
    `missed` so many positions, which it must read before it drafts; `greedy`: no token of it is
    drawn."""

    index: int
    room: int
    speculates: bool = True
    missed: int = 0
    greedy: bool = False

    def at_most(self, length: int) -> int:
        """That length, as far as this row can use it."""
        return max(0, min(length, self.room)) if self.speculates else 0


@runtime_checkable
class Batching(Protocol):
    """One writer: the engine that asks it."""

    def lengths(self, rows: Sequence[RowView]) -> tuple[int, ...]:
        """The draft length of every row, 0 = none, in the order of the rows."""

    def would_draft(self, rows: Sequence[RowView]) -> bool:
        """Whether any of these rows would draft now. Asked while prompts are read, so that no
        drafter reads what it will not need: a guess, which changes nothing."""

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """What became of the rows of the last `lengths`, in the same order."""

    def to_json(self) -> Mapping[str, Any]:
        """Its name, settings and what it has learned, for reports."""


@runtime_checkable
class Choosing(Protocol):
    """A batch policy that also chooses among the tokens that were drafted. It may: tokens that were
    not drawn (POINT) are a function of the past, and so is any choice among them."""

    def chosen(self, tree: DraftTree) -> DraftTree:
        """Of the tree of the round that was last asked about, what the target is to read."""


@dataclass(frozen=True, slots=True)
class BatchingEntry:
    """What the module of a batch policy defines as BATCHING. `make(depth, costs)` gives a fresh
    one, and may take one `setting` more, by name; it `reads_costs` unless that is given."""

    name: str
    summary: str
    paper: str
    make: Callable[..., Batching]
    setting: str = ""
    reads_costs: bool = False
