"""Siblings of which all but one are q's likeliest tokens: one rejection test for the whole node.

Hu et al., "Towards optimal multi-draft speculative decoding" (arXiv 2502.18779). With C the fixed
siblings and q' = norm(q without C), the distribution of the sampled one, z: accept z if u q'(z) <
p(z), else draw y from norm([p - q']+); if y is in C its branch is followed, as q' leaves p
untouched there. The node is left by a draft with probability p(C) + sum over x not in C of min(p,
q'): the optimum for drafts of this distribution. y is drawn with the noise of its position. Letters
as in `walk`.
Letters: B rows, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar_siblings
from specctl.runtime.verify.siblings import scaled
from specctl.runtime.verify.target_only import target_only
from specctl.runtime.verify.walk import (
    DraftDistribution,
    Rule,
    Verdict,
    children_of,
    log_distribution,
    row,
    tree_verdict,
)


def top_plus_one(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Down the tree, level by level; a row that stopped repeats its last, failed test."""
    p_BTV = scores_BTV.softmax(-1)
    if not tree.num_nodes:  # drawn as a row without children is drawn beside others
        return target_only(tree, scores_BTV, noise)
    distribution = DraftDistribution.of(tree, p_BTV)
    u_BN = noise.accept_BT(tree.num_nodes + 1)[:, 1:].to(p_BTV.dtype)
    gumbel_BTV = noise.target_BTV(tree.depth_BT(), p_BTV.shape[-1]).to(p_BTV.dtype)
    at_B = next_B = tree.token_BN.new_zeros(tree.token_BN.shape[0])
    for _ in range(tree.depth + 1):
        child_BN, key_BN = children_of(tree, at_B)
        z_B1 = torch.where(child_BN, key_BN, key_BN.amax() + 1).argmin(1, keepdim=True)
        is_z_BN = torch.zeros_like(child_BN).scatter_(1, z_B1, True) & child_BN
        q_BK = _without(distribution, row(distribution.prob_BTK, at_B), child_BN & ~is_z_BN)
        p_BV = row(p_BTV, at_B)
        q_z_B1 = q_BK.gather(1, distribution.column_BN.gather(1, z_B1)) * distribution.on_BN.gather(
            1, z_B1
        )
        p_z_B1 = p_BV.gather(1, tree.token_BN.clamp(min=0).gather(1, z_B1))
        pass_B1 = (u_BN.gather(1, z_B1) * q_z_B1 < p_z_B1) & (q_z_B1 > 0) & is_z_BN.any(1, True)
        next_B = _draw(distribution, p_BV, q_BK * child_BN.any(1, True), row(gumbel_BTV, at_B))
        hit_BN = child_BN & (tree.token_BN == next_B[:, None])
        hit_BN = torch.where(pass_B1, is_z_BN, hit_BN)
        at_B = torch.where(hit_BN.any(1), hit_BN.int().argmax(1) + 1, at_B)
    return tree_verdict(tree, tree.ancestor_BTT(), at_B, next_B)


def _without(distribution: DraftDistribution, q_BK: Tensor, fixed_BN: Tensor) -> Tensor:
    """q with the fixed siblings taken out, scaled; zero if nothing is left of it."""
    gone_BN = fixed_BN & distribution.on_BN
    taken_BK = torch.zeros_like(q_BK).scatter_add_(
        1, distribution.column_BN, gone_BN.to(q_BK.dtype)
    )
    return scaled(q_BK.masked_fill(taken_BK > 0, 0.0))


def _draw(distribution: DraftDistribution, p_BV: Tensor, q_BK: Tensor, gumbel_BV: Tensor) -> Tensor:
    """[B]: a token by [p - q]+, by p where that has no mass."""
    left_BV = distribution.minus(p_BV, q_BK)
    left_BV = torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)
    return best_token(log_distribution(left_BV) + gumbel_BV)


RULE = Rule(
    "top-plus-one",
    "q's top tokens and one sample, one test a node",
    "https://arxiv.org/abs/2502.18779",
    top_plus_one,
    scalar_siblings.top_plus_one,
    {NodeKind.TOP_PLUS_ONE},
)
