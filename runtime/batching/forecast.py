"""Forecast: what a batch policy expects of its rounds, against what they did.

Goodput is tokens emitted per second of the rounds (drafting, verification, and what the drafter had
missed), all rows together; prompts that the target reads are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.core.drafter import Outcome, RoundSeconds


@dataclass(slots=True)
class Forecast:
    """Sums over rounds. One writer: the policy that owns it."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen_tokens: int = 0
    seen_seconds: float = 0.0

    def expect(self, tokens: float, seconds: float) -> None:
        """Of the coming round."""
        self.tokens += tokens
        self.seconds += seconds

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        """The round that was expected last."""
        self.seen_tokens += sum(len(new) for new in outcome.emitted)
        self.seen_seconds += seconds.draft + seconds.verify + seconds.wake

    def to_json(self) -> dict[str, float] | None:
        """Tokens per second; None before a round is over."""
        if min(self.seconds, self.seen_seconds) <= 0:
            return None
        predicted, measured = self.tokens / self.seconds, self.seen_tokens / self.seen_seconds
        return {
            "predicted": round(predicted, 2),
            "measured": round(measured, 2),
            "measured_over_predicted": round(measured / predicted, 4),
        }
