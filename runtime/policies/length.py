"""How many tokens are worth drafting: what chooses a round's draft length by its costs.

E[tau](alpha, k) / (draft[k] + verify[k]) is maximised over k = 0 (no speculation) up to the
longest measured length, with alpha estimated from recent rounds. Verification costs are a
staircase, so the global argmax is taken, never a local step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.runtime.measure.cost_table import CostTable


@dataclass(slots=True)
class LengthChooser:
    """Chooses each round's draft length from a cost table and the running acceptance.

    One writer: the engine. `memory` rounds are remembered (exponentially). While speculation is
    off, every `probe_every`-th round drafts `probe_length` tokens to notice when it pays again.
    """

    costs: CostTable
    alpha: float = 0.6
    memory: float = 32.0
    probe_every: int = 16
    probe_length: int = 2
    rounds: int = 0
    rounds_off: int = 0
    _accepted: float = field(default=0.0, init=False)
    _tested: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._accepted, self._tested = 2.0 * self.alpha, 2.0

    def length(self, batch: int) -> int:
        del batch
        self.rounds += 1
        best = self.costs.best_length(self.estimate())
        if best == 0:
            self.rounds_off += 1
            if self.rounds_off % self.probe_every == 0:
                return self.probe_length
        return best

    def estimate(self) -> float:
        """Running acceptance of tested drafts, kept inside (0, 1)."""
        return min(0.999, max(1e-3, self._accepted / self._tested))

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        del seconds
        depth = outcome.tree.depth
        if depth == 0:
            return
        fade = 1.0 - 1.0 / self.memory
        for accepted, finished in zip(outcome.num_accepted, outcome.finished, strict=True):
            if finished is not None:
                continue  # a cut round is no rejection
            self._accepted = fade * self._accepted + accepted
            self._tested = fade * self._tested + min(depth, accepted + 1)


@dataclass(slots=True)
class FixedLength(LengthChooser):
    """Always the same draft length, with per-round times kept: the probe that fills a table."""

    fixed: int = 0
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)

    def length(self, batch: int) -> int:
        del batch
        return self.fixed

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        is_full = len(outcome.emitted) == self.costs.batch  # rows may have left already
        if outcome.tree.depth == self.fixed and is_full:
            self.draft_seconds.append(seconds.draft)
            self.verify_seconds.append(seconds.verify)
