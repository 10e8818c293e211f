"""Sequoia's rejection without replacement, with its fallback once the draft distribution is used
up.

Chen et al., arXiv 2402.12374, Section 3.2: as `recursive`, but where all of q's mass was tried the
draft goes on with tokens drawn uniformly from those not tried yet, and the rule tests them with
that distribution. So low temperatures and top-p, which leave q few tokens, do not waste the tree's
width; with as many siblings as the draft vocabulary has tokens nothing is ever rejected. Letters as
in `walk`.
Letters: B rows, K draft vocabulary, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar_siblings
from specctl.runtime.verify.siblings import Missed, residual, scaled, walk_down
from specctl.runtime.verify.walk import Rule, Verdict


def sequoia(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Test siblings in draw order; those drawn after q was used up with a uniform distribution."""
    return walk_down(tree, scores_BTV, noise, _rest_or_uniform)


def _rest_or_uniform(missed: Missed) -> tuple[Tensor, Tensor]:
    untried_BK = (~missed.tried_BK).to(missed.s_BK.dtype)
    rest_BK = missed.rest_BK
    used_up_B1 = rest_BK.sum(-1, keepdim=True) <= 0
    return residual(missed), scaled(torch.where(used_up_B1, untried_BK, rest_BK))


RULE = Rule(
    "sequoia",
    "distinct siblings in turn, uniform once q is used up",
    "https://arxiv.org/abs/2402.12374",
    sequoia,
    scalar_siblings.sequoia,
    {NodeKind.REFILLED},
)
