"""DISCO (arXiv 2405.04304): a small classifier decides behind every token, continue or verify.

It reads the drafter's largest probabilities, the probability of the kept token, the entropy and the
position in the draft, and gives the chance that this token is accepted.
Letters: B rows, C candidates, K draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.plugins import Plugin
from specctl.runtime.stops.base import DraftStep, entropy_B
from specctl.runtime.stops.learned import LearnedStop, residual_net

TOP = 5
LONGEST = 16.0  # positions are given as a share of this


@dataclass(slots=True)
class Disco(LearnedStop):
    """Stops behind a token whose chance of acceptance is below `threshold`."""

    name = "disco"
    threshold: float = 0.5

    @classmethod
    def new_net(cls, num_inputs: int) -> nn.Module:
        return residual_net(num_inputs, num_blocks=1)

    def features(self, step: DraftStep) -> Tensor:
        distribution_BK = step.distribution_BK()
        top_BC = distribution_BK.topk(min(TOP, distribution_BK.shape[1]), dim=-1).values
        top_BC = F.pad(top_BC, (0, TOP - top_BC.shape[1]))
        at_B = torch.full_like(top_BC[:, 0], step.index / LONGEST)
        rest = [step.chance_B(distribution_BK), entropy_B(distribution_BK), at_B]
        return torch.cat([top_BC, torch.stack(rest, dim=1)], dim=1)

    def stops(self, step: DraftStep) -> Tensor:
        return torch.sigmoid(self.output_B(step)) < self.threshold


STOP = Plugin("disco", "where a classifier says verify", "https://arxiv.org/abs/2405.04304", Disco)
