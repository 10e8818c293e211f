"""When a comparison says too little to name a winner: noise, few tokens, shares of few counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

PAYS = 1.05  # a smaller gain is within the noise
FEW_TOKENS = 128  # timed tokens from which a speed says something
FEW_COUNTS = 10  # tested drafts from which a share says something
SLACK = 1.02  # clocks are read to this
SURE = 2  # standard errors beyond which a difference is more than the noise


def standing(speedup: float, error: float | None) -> Literal["faster", "level", "slower"]:
    """How a drafter stands to plain decoding: level where the difference is within the noise.
    `error`: standard error of the speed-up; None where one run says nothing of it."""
    noise = PAYS - 1.0 if error is None else SURE * error
    if abs(speedup - 1.0) <= noise:
        return "level"
    return "faster" if speedup > 1.0 else "slower"


def doubts(
    speedup: float, tau: float | None, tokens: int, each: Sequence[float] = ()
) -> tuple[str, ...]:
    """Why a speed-up is no finding yet; empty where it is one. `each`: the speed-ups of the single
    runs, of which `speedup` is the middle."""
    found = []
    if tokens < FEW_TOKENS:
        found.append(f"only {tokens:,} tokens were timed")
    if tau is not None and speedup > tau * SLACK:
        found.append(
            f"a speed-up of {speedup:.2f} is more than {tau:.2f} tokens a pass can bring: other "
            "work slowed the plain runs"
        )
    if len(each) > 1 and min(each) < 1.0 < max(each) and abs(speedup - 1.0) > PAYS - 1.0:
        found.append(f"single runs lie between {min(each):.2f} and {max(each):.2f}")
    return tuple(found)


def counted_shares(accepted_at: Sequence[int], tested_at: Sequence[int]) -> list[str]:
    """Accepted / tested of every position; a share of few counts is written with its count."""
    pairs = zip(accepted_at, tested_at, strict=True)
    return [
        f"{accepted / max(1, tested):.2f}" + (f" (of {tested})" if tested < FEW_COUNTS else "")
        for accepted, tested in pairs
    ]
