"""The heuristic schedule of transformers' assisted generation: two more after a round in which
every token was accepted, one fewer (never below one) after any other. The length is common to all
rows and lives as long as the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import StopRule, tested_rows


@dataclass(slots=True)
class Heuristic(StopRule):
    """Starts at `start`; the chain's own length is the ceiling."""

    start: int = 5
    more: int = 2
    fewer: int = 1
    wanted: int = field(init=False)
    most: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.wanted = self.start

    def length(self, most: int) -> int:
        self.most = max(self.most, most)
        return max(1, min(self.wanted, most))

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        rows = list(tested_rows(outcome))
        if not rows:
            return
        if all(row.accepted == row.drafted for row in rows):
            self.wanted = min(self.wanted + self.more, self.most)
        else:
            self.wanted = max(1, self.wanted - self.fewer)


STOP = Plugin("heuristic", "two more after a whole draft, one fewer after any other", "", Heuristic)
