"""How many tokens are worth drafting: the cost table and what chooses a round's draft length.

E[tau](alpha, k) / (draft[k] + verify[k]) is maximised over k = 0 (no speculation) up to the
longest measured length, with alpha estimated from recent rounds. Verification costs are a
staircase, so the global argmax is taken, never a local step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.runtime.measure.stats import expected_tau


def on_line(known: Mapping[int, float], at: int) -> float:
    """Measured values as they are, straight lines between and beyond them."""
    sizes = sorted(known)
    if at in known or len(sizes) == 1:
        return known.get(at, known[sizes[0]])
    above = next((k for k in sizes[1:] if k >= at), sizes[-1])
    below = sizes[sizes.index(above) - 1]
    slope = (known[above] - known[below]) / (above - below)
    return known[below] + slope * (at - below)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds per round by draft length: `draft[k]`, `verify[k]`; k = 0 is plain decoding."""

    draft: Mapping[int, float]
    verify: Mapping[int, float]
    device: str
    dtype: str
    batch: int

    def round_seconds(self, length: int) -> float:
        return self.draft[length] + self.verify[length]

    def seconds(self, length: int) -> float:
        """Of a round of any length: measured, or on a line through measured ones."""
        known = {k: self.round_seconds(k) for k in self.verify}
        return on_line(known, length)

    def best_length(self, alpha: float) -> int:
        """The draft length with most expected tokens per second; 0 where speculation loses."""
        return max(self.verify, key=lambda k: expected_tau(alpha, k) / self.round_seconds(k))

    def speedup(self, alpha: float, length: int) -> float:
        """Predicted speed-up over plain decoding."""
        return expected_tau(alpha, length) * self.round_seconds(0) / self.round_seconds(length)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"length": k, "draft_ms": 1e3 * self.draft[k], "verify_ms": 1e3 * self.verify[k]}
            for k in sorted(self.verify)
        ]
        return {"device": self.device, "dtype": self.dtype, "batch": self.batch, "rows": rows}


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
