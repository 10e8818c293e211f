"""Whether a drafter has learned its rows by heart: it is much better on them than on held-out
prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GAP = 0.2  # of the share of tokens found, beyond what rows and prompts of different kinds explain
WINDOW = 5  # last lines of the log that speak for the end of training


def overfitting(log: Sequence[Mapping[str, Any]]) -> str | None:
    """What the lines of metrics.jsonl say of it; None where the two are alike, or not known."""
    trained = [line["top1"] for line in log if "top1" in line][-WINDOW:]
    measured = [line["measured_alpha"] for line in log if line.get("measured_alpha")]
    if not trained or not measured:
        return None
    known, found = sum(trained) / len(trained), measured[-1][0]
    if known - found < GAP:
        return None
    return (
        f"the drafter finds {known:.0%} of the next tokens in its training rows and {found:.0%} on "
        "held-out prompts: more answers would help (data.prompts, --data self), more steps not"
    )
