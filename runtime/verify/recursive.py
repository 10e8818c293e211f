"""Recursive rejection over the siblings of a sampled tree, from the root down.

At a node with law r = p and draft law s = q, for each child in draw order: accept x if
u s(x) < r(x); else r := norm([r - s]+), and for siblings drawn without replacement s(x) := 0,
s := norm(s). After the last miss draw from r. Without replacement this is the rule of RSD
(Jeon et al., arXiv 2402.14160) and Sequoia; for i.i.d. siblings, duplicates kept, it is the
multi-round rule of SpecInfer (arXiv 2305.09781). Once s is used up, further siblings are not draws
from anything and are rejected. Letters as in `walk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.drafters.parts.tree import DraftTree, NodeKind
from specctl.runtime.noise import Noise
from specctl.runtime.verify.chain import bonus_only
from specctl.runtime.verify.walk import DraftLaw, Verdict, draw, draw_key, row, tree_verdict


def recursive(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """One pass over the nodes, by depth and draw order; a node matters if its parent is where the
    walk stands."""
    p_BTV = scores_BTV.softmax(-1)
    if not tree.num_nodes:
        return bonus_only(p_BTV, noise)
    law = DraftLaw.of(tree, p_BTV)
    u_BT = noise.accept_BT(tree.num_nodes + 1).to(p_BTV.dtype)
    token_BN = tree.token_BN.clamp(min=0)
    ancestor_BTT = tree.ancestor_BTT()
    order_BN = _by_depth_and_draw(tree, ancestor_BTT)
    at_B = order_BN.new_zeros(order_BN.shape[0])
    r_BV, s_BK = row(p_BTV, at_B), row(law.prob_BTK, at_B)
    for step in range(tree.num_nodes):
        node_B1 = order_BN[:, step : step + 1]
        child_B1 = tree.valid_BN.gather(1, node_B1)
        child_B1 = child_B1 & (tree.parent_BN.gather(1, node_B1) + 1 == at_B[:, None])
        column_B1 = law.column_BN.gather(1, node_B1)
        r_x_B1 = r_BV.gather(1, token_BN.gather(1, node_B1))
        raw_B1, on_B1 = s_BK.gather(1, column_B1), law.on_BN.gather(1, node_B1)
        s_x_B1 = raw_B1 * on_B1
        pass_B1 = (u_BT.gather(1, node_B1 + 1) * s_x_B1 < r_x_B1) & (s_x_B1 > 0)
        take_B1, miss_B1 = child_B1 & pass_B1, child_B1 & ~pass_B1
        r_BV = torch.where(miss_B1, _norm(law.minus(r_BV, s_BK)), r_BV)
        if tree.kind is NodeKind.WITHOUT_REPLACEMENT:
            without_BK = s_BK.scatter(1, column_B1, raw_B1 * ~on_B1)
            s_BK = torch.where(miss_B1, _norm(without_BK), s_BK)
        at_B = torch.where(take_B1, node_B1 + 1, at_B[:, None])[:, 0]
        r_BV = torch.where(take_B1, row(p_BTV, at_B), r_BV)
        s_BK = torch.where(take_B1, row(law.prob_BTK, at_B), s_BK)
    next_B = draw(r_BV, row(p_BTV, at_B), noise)
    return tree_verdict(tree, ancestor_BTT, at_B, next_B)


def _by_depth_and_draw(tree: DraftTree, ancestor_BTT: Tensor) -> Tensor:
    """[B, N]: node indices, every parent before its children, siblings in draw order."""
    T = tree.num_nodes + 1
    key_BT = (ancestor_BTT.sum(-1) - 1) * T * T + draw_key(tree)
    return key_BT[:, 1:].argsort(1)


def _norm(law_BX: Tensor) -> Tensor:
    """Scaled to sum one; a law without mass stays zero."""
    mass_B1 = law_BX.sum(-1, keepdim=True)
    return law_BX / torch.where(mass_B1 > 0, mass_B1, 1.0)
