"""K-SEQ: sequential selection from k i.i.d. siblings, near the optimal transport of q^k to p.

Sun et al., "SpecTr" (arXiv 2310.15141), Algorithm 2. With beta(rho) = sum_x min(p(x) / rho, q(x))
and p_acc = 1 - (1 - beta)^k: accept the first sibling with u rho q(x) < p(x); if none, draw from
norm([p - min(p / rho, q) p_acc / beta]+). Valid if p_acc <= rho beta, as then no token is emitted
too often; the smallest such rho in [1, k] accepts most. It is bracketed by halving, and the upper
end is kept: a rho too large is only slower, one too small is wrong. Letters as in `walk`.
Letters: B rows, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar_siblings
from specctl.runtime.verify.chain import bonus_only
from specctl.runtime.verify.walk import (
    IID,
    DraftDistribution,
    Rule,
    Verdict,
    children_of,
    draw,
    row,
    tree_verdict,
)

HALVINGS = 32
_TINY = 1e-30


def spectr(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Down the tree, level by level; a row that stopped repeats its last, failed selection."""
    if not tree.num_nodes:
        return bonus_only(scores_BTV, noise)
    p_BTV = scores_BTV.softmax(-1)
    distribution = DraftDistribution.of(tree, p_BTV)
    u_BN = noise.accept_BT(tree.num_nodes + 1)[:, 1:].to(p_BTV.dtype)
    fed_BN, token_BN = tree.parent_BN + 1, tree.token_BN.clamp(min=0)
    p_BN = p_BTV.flatten(1).gather(1, fed_BN * p_BTV.shape[2] + token_BN)
    q_BN = distribution.of_token(fed_BN)
    at_B = tree.token_BN.new_zeros(tree.token_BN.shape[0])
    left_BV = p_BTV[:, 0]
    for _ in range(tree.depth + 1):
        child_BN, key_BN = children_of(tree, at_B)
        num_B1 = child_BN.sum(1, keepdim=True).to(p_BTV.dtype)
        p_BV, q_BK = row(p_BTV, at_B), row(distribution.prob_BTK, at_B)
        rho_B1 = smallest_rho(distribution.on_support(p_BV), q_BK, num_B1.clamp(min=1))
        left_BV = _left(distribution, p_BV, q_BK, rho_B1, num_B1)
        pass_BN = child_BN & (u_BN * rho_B1 * q_BN < p_BN) & (q_BN > 0)
        first_BN = torch.where(pass_BN, key_BN, key_BN.amax() + 1).argmin(1)
        at_B = torch.where(pass_BN.any(1), first_BN + 1, at_B)
    next_B = draw(left_BV, row(p_BTV, at_B), noise)
    return tree_verdict(tree, tree.ancestor_BTT(), at_B, next_B)


def smallest_rho(p_BK: Tensor, q_BK: Tensor, num_B1: Tensor) -> Tensor:
    """[B, 1]: the root of 1 - (1 - beta(rho))^k = rho beta(rho) in [1, k], from above."""
    low_B1, high_B1 = torch.ones_like(num_B1), num_B1
    for _ in range(HALVINGS):
        middle_B1 = (low_B1 + high_B1) / 2
        beta_B1 = torch.minimum(p_BK / middle_B1, q_BK).sum(-1, keepdim=True).clamp(max=1.0)
        is_valid_B1 = 1.0 - (1.0 - beta_B1) ** num_B1 <= middle_B1 * beta_B1
        high_B1 = torch.where(is_valid_B1, middle_B1, high_B1)
        low_B1 = torch.where(is_valid_B1, low_B1, middle_B1)
    return high_B1


def _left(
    distribution: DraftDistribution, p_BV: Tensor, q_BK: Tensor, rho_B1: Tensor, num_B1: Tensor
) -> Tensor:
    """What is left of p when none of the siblings was selected; p itself without siblings."""
    taken_BK = torch.minimum(distribution.on_support(p_BV) / rho_B1, q_BK)
    beta_B1 = taken_BK.sum(-1, keepdim=True).clamp(max=1.0)
    some_B1 = 1.0 - (1.0 - beta_B1) ** num_B1
    return distribution.minus(p_BV, taken_BK * (some_B1 / beta_B1.clamp(min=_TINY)))


RULE = Rule(
    "spectr",
    "i.i.d. siblings by k-sequential selection",
    "https://arxiv.org/abs/2310.15141",
    spectr,
    scalar_siblings.spectr,
    IID,
)
