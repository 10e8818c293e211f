"""The walk from the root down that rejection rules share: siblings are tested one after another.

At a node with distribution r = p and draft distribution s = q, for each child in draw order: accept
x if u s(x) < r(x); else r and s become what the rule's `after_miss` makes of them. After the last
miss draw from r. Letters as in `walk`.
Letters: B rows, K draft vocabulary, N nodes, T fed tokens, V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify.chain import bonus_only
from specctl.runtime.verify.walk import (
    DraftDistribution,
    Verdict,
    draw,
    draw_key,
    row,
    tree_verdict,
)


@dataclass(frozen=True, slots=True)
class Missed:
    """A sibling that failed its test: its distribution, and the draft distribution with the sibling
    taken out.

    r_BV, s_BK   target and draft distribution it was tested against
    rest_BK      s without the missed token, not scaled
    tried_BK     rows of the support that this node's tests have missed, this one included
    """

    distribution: DraftDistribution
    r_BV: Tensor
    s_BK: Tensor
    rest_BK: Tensor
    tried_BK: Tensor


AfterMiss = Callable[[Missed], tuple[Tensor, Tensor]]


def walk_down(tree: DraftTree, scores_BTV: Tensor, noise: Noise, after_miss: AfterMiss) -> Verdict:
    """One pass over the nodes, by depth and draw order; a node matters if its parent is where the
    walk stands."""
    if not tree.num_nodes:
        return bonus_only(scores_BTV, noise)
    p_BTV = scores_BTV.softmax(-1)
    distribution = DraftDistribution.of(tree, p_BTV)
    u_BT = noise.accept_BT(tree.num_nodes + 1).to(p_BTV.dtype)
    token_BN = tree.token_BN.clamp(min=0)
    ancestor_BTT = tree.ancestor_BTT()
    order_BN = _by_depth_and_draw(tree, ancestor_BTT)
    at_B = order_BN.new_zeros(order_BN.shape[0])
    r_BV, s_BK = row(p_BTV, at_B), row(distribution.prob_BTK, at_B)
    tried_BK = torch.zeros_like(s_BK, dtype=torch.bool)
    for step in range(tree.num_nodes):
        node_B1 = order_BN[:, step : step + 1]
        child_B1 = tree.valid_BN.gather(1, node_B1)
        child_B1 = child_B1 & (tree.parent_BN.gather(1, node_B1) + 1 == at_B[:, None])
        column_B1 = distribution.column_BN.gather(1, node_B1)
        on_B1 = distribution.on_BN.gather(1, node_B1)
        r_x_B1 = r_BV.gather(1, token_BN.gather(1, node_B1))
        raw_B1 = s_BK.gather(1, column_B1)
        s_x_B1 = raw_B1 * on_B1
        pass_B1 = (u_BT.gather(1, node_B1 + 1) * s_x_B1 < r_x_B1) & (s_x_B1 > 0)
        take_B1, miss_B1 = child_B1 & pass_B1, child_B1 & ~pass_B1
        missed_BK = tried_BK.scatter(1, column_B1, on_B1 | tried_BK.gather(1, column_B1))
        tried_BK = torch.where(miss_B1, missed_BK, tried_BK)
        rest_BK = s_BK.scatter(1, column_B1, raw_B1 * ~on_B1)
        left_BV, next_BK = after_miss(Missed(distribution, r_BV, s_BK, rest_BK, tried_BK))
        r_BV, s_BK = torch.where(miss_B1, left_BV, r_BV), torch.where(miss_B1, next_BK, s_BK)
        at_B = torch.where(take_B1, node_B1 + 1, at_B[:, None])[:, 0]
        r_BV = torch.where(take_B1, row(p_BTV, at_B), r_BV)
        s_BK = torch.where(take_B1, row(distribution.prob_BTK, at_B), s_BK)
        tried_BK = tried_BK & ~take_B1
    next_B = draw(r_BV, row(p_BTV, at_B), noise)
    return tree_verdict(tree, ancestor_BTT, at_B, next_B)


def residual(missed: Missed) -> Tensor:
    """norm([r - s]+): what the target still has to give after the miss."""
    return scaled(missed.distribution.minus(missed.r_BV, missed.s_BK))


def scaled(distribution_BX: Tensor) -> Tensor:
    """Scaled to sum one; a distribution without mass stays zero."""
    mass_B1 = distribution_BX.sum(-1, keepdim=True)
    return distribution_BX / torch.where(mass_B1 > 0, mass_B1, 1.0)


def _by_depth_and_draw(tree: DraftTree, ancestor_BTT: Tensor) -> Tensor:
    """[B, N]: node indices, every parent before its children, siblings in draw order."""
    T = tree.num_nodes + 1
    key_BT = (ancestor_BTT.sum(-1) - 1) * T * T + draw_key(tree)
    return key_BT[:, 1:].argsort(1)
