"""How many samples a chi-square test needs to see a distribution that is wrong by so much.

If the distribution is off by total variation d, Pearson's statistic is noncentral with parameter at
least 4 n d^2 (as sum (f - p)^2 / p >= 4 d^2). Its distribution is taken as normal, which needs a
few percent more samples than are needed where cells are few.
"""

from __future__ import annotations

from math import ceil, sqrt

import torch

ALARM = 1e-5  # false alarm rate of each statistical check
_Z_POWER = 2.326  # a wrong distribution of that size is seen 99 times in 100
_TYPICAL_CELLS = 64


def samples_for(distance: float, cells: int = _TYPICAL_CELLS) -> int:
    """Samples that show a distribution so far (total variation) from the right one."""
    return 100 * ceil(noncentrality(cells) / (4 * distance**2) / 100)


def visible(samples: int, cells: int) -> float:
    """The distance that so many samples in so many cells show."""
    return min(1.0, sqrt(noncentrality(cells) / (4 * samples))) if cells > 1 else 1.0


def noncentrality(cells: int) -> float:
    """The noncentrality at which the test fails 99 times in 100."""
    freedom = cells - 1
    limit = critical(freedom)
    spread = 2 * _Z_POWER + sqrt(4 * _Z_POWER**2 - 2 * freedom + 4 * limit)
    return (spread**2 - 2 * freedom) / 4


def critical(freedom: int) -> float:
    """The statistic that a right distribution exceeds with chance `ALARM`, by halving."""
    low, high = 0.0, 100.0 + 4.0 * freedom
    for _ in range(60):
        middle = (low + high) / 2
        half = torch.tensor([freedom / 2, middle / 2], dtype=torch.float64)
        is_likely = float(torch.special.gammaincc(half[0], half[1])) > ALARM
        low, high = (middle, high) if is_likely else (low, middle)
    return high
