"""What the tests of draft vocabularies share: counted tokens, and what a head costs."""

from __future__ import annotations

import torch

from specctl.train.vocab.coverage import TokenCounts
from specctl.train.vocab.measure import HeadCost

COST = HeadCost(plain=1.0, verify=1.2, body=0.02, head=0.2, calls=4, vocab_size=96)


def counts(*number: int, **domains: list[int]) -> TokenCounts:
    by_domain = domains or {"d": list(number)}
    return TokenCounts({name: torch.tensor(n) for name, n in by_domain.items()})
