"""What joint training made of a target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetChange:
    """What joint training made of a target, measured on `tokens` tokens of held-out text: `name`
    and `fingerprint` of the original, KL(original || changed) in nats per token, the share of
    places where both find the same token most probable, the perplexity of either."""

    name: str
    fingerprint: str
    kl: float
    agreement: float
    perplexity_before: float
    perplexity: float
    tokens: int

    def text(self) -> str:
        return (
            f"changed from {self.name}: KL {self.kl:.4f} nats a token, the same greedy token in "
            f"{self.agreement:.1%} of places, perplexity {self.perplexity_before:.2f} before and "
            f"{self.perplexity:.2f} after ({self.tokens:,} tokens of held-out text)"
        )
