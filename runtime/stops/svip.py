"""SVIP (arXiv 2411.18462): stop where the drafter's entropy says that acceptance is unlikely.

Acceptance is at least 1 - sqrt(KL / 2), and the divergence is cross-entropy minus the draft's own
entropy H(q). With the cross-entropy taken as proportional to H(q), a bound that needs no target is
1 - sqrt(c H(q)): stop behind a token when sqrt(c H(q)) > h. H is that of the full untempered
distribution.
Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep, StopRule, entropy_B


@dataclass(slots=True)
class Svip(StopRule):
    """sqrt(`scale` H) > `threshold`: with the defaults, more than 0.6 nat."""

    threshold: float = 0.3
    scale: float = 0.15

    def stops(self, step: DraftStep) -> Tensor:
        return (self.scale * entropy_B(step.distribution_BK())).sqrt() > self.threshold


STOP = Plugin(
    "svip", "where the drafter's entropy is high", "https://arxiv.org/abs/2411.18462", Svip
)
