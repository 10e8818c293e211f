"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): a probable enough token stands.

A drafted x stands if

    p(x) >= min(epsilon, delta exp(-H(p))),

p being the target's distribution (of greedy rows that of temperature 1) and H its entropy: the less
sure the target is, the less probable a token may be. Medusa accepts by this alone; here the
target's own choices are kept, too, so that numbers which no probability reaches (`typical:2:1e6`)
give the lossless rule. In a tree the longest path is taken. Approximate.
Letters: B rows, N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.verify.relaxed.base import Knob, RelaxedRule


def stands(tree: DraftTree, hit_BN: Tensor, scores_BNV: Tensor, values: Sequence[float]) -> Tensor:
    """[B, N]: drafts that are probable enough."""
    epsilon, delta = values
    p_BNV = scores_BNV.softmax(-1)
    entropy_BN = -torch.xlogy(p_BNV, p_BNV).sum(-1)
    p_BN = p_BNV.gather(2, tree.token_BN.clamp(min=0)[:, :, None])[:, :, 0]
    return p_BN >= (delta * (-entropy_BN).exp()).clamp(max=epsilon)


RELAXED = RelaxedRule(
    "typical",
    "a token stands that the target finds probable enough for its entropy",
    "https://arxiv.org/abs/2401.10774",
    stands,
    (Knob("epsilon", 0.09), Knob("delta", 0.3)),
)
