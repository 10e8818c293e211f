"""Traversal verification of a sampled tree: block verification generalised, from the leaves up.

Weng et al., "Traversal verification for speculative tree decoding" (arXiv 2505.12398), in the
recursive form (equal to the paper's deletion of leaves):

    visit(n): w_n = min(1, w_par P_par(t_n) / Q_par(t_n)) on entry (1 at the root); P_n, Q_n = p, q
      for child c in draw order: if visit(c) accepts, done; else with s = sum [w_n P_n - Q_n]+
          P_n := [w_n P_n - Q_n]+ / s;  w_n := s / (s + 1 - w_n)
          without replacement: Q_n(t_c) := 0, Q_n := norm(Q_n)      (i.i.d.: Q_n stays)
      accept the path to n if n is the root or u_n < w_n, and draw from P_n.

Here the recursion is a static loop over nodes in post-order, with parallel rows each in its own
order. The weight on entry of a node below a chain of first children is min(A, w_top B), A and B
known beforehand, since P and Q of those parents are still untouched. Letters as in `walk`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafters.parts.tree import DraftTree, NodeKind
from specctl.runtime.noise import Noise
from specctl.runtime.verify.block import block
from specctl.runtime.verify.walk import (
    DraftLaw,
    Verdict,
    draw,
    draw_key,
    earlier_sibling,
    row,
    tree_verdict,
)

_HUGE = 1e30


def traversal(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """The accepted path and a token from what is left of the law at its end."""
    if tree.is_chain:
        return block(tree, scores_BTV, noise)
    return traverse(tree, scores_BTV, noise)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The static side of the walk; everything [B, T] by fed index.

    order_BN  fed indices in post-order, padding last, the root left out
    next_BT   the next drawn sibling, -1 = none
    top_BT    the highest fed token reached by going up through first children only
    """

    order_BN: Tensor
    parent_BT: Tensor
    next_BT: Tensor
    first_BT: Tensor
    top_BT: Tensor


def traverse(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """`traversal` without the short cut for chains."""
    p_BTV = scores_BTV.softmax(-1)
    law = DraftLaw.of(tree, p_BTV)
    ancestor_BTT = tree.ancestor_BTT()
    plan = _plan(tree, ancestor_BTT)
    token_BT = torch.nn.functional.pad(tree.token_BN.clamp(min=0), (1, 0))
    column_BT = torch.nn.functional.pad(law.column_BN, (1, 0))
    on_BT = torch.nn.functional.pad(law.on_BN, (1, 0))
    low_BT, slope_BT = _first_child_weights(tree, p_BTV, law, plan)
    weight_BT = torch.minimum(low_BT, slope_BT)
    left_BTV, q_BTK = p_BTV.clone(), law.prob_BTK.clone()
    u_BT = noise.accept_BT(tree.num_nodes + 1).to(p_BTV.dtype)
    valid_BT = tree.fed_valid_BT()
    batch_B1 = torch.arange(len(p_BTV), device=p_BTV.device)[:, None]
    end_B1 = torch.zeros_like(batch_B1)
    for step in range(tree.num_nodes):
        node_B1 = plan.order_BN[:, step : step + 1]
        passes_B1 = u_BT.gather(1, node_B1) < weight_BT.gather(1, node_B1)
        take_B1 = passes_B1 & valid_BT.gather(1, node_B1) & (end_B1 == 0)
        end_B1 = torch.where(take_B1, node_B1, end_B1)
        # A rejected node changes its parent. After an acceptance this goes on idly: it touches
        # ancestors of later nodes only, never the node where the path ends.
        parent_B1 = plan.parent_BT.gather(1, node_B1)
        batch_B, parent_B = batch_B1[:, 0], parent_B1[:, 0]
        w_B1 = weight_BT.gather(1, parent_B1)
        p_BV, q_BK = left_BTV[batch_B, parent_B], q_BTK[batch_B, parent_B]
        excess_BV = law.minus(w_B1 * p_BV, q_BK)
        mass_B1 = excess_BV.sum(-1, keepdim=True)
        p_BV = torch.where(mass_B1 > 0, excess_BV / mass_B1, p_BV)
        whole_B1 = mass_B1 + (1.0 - w_B1)
        w_B1 = torch.where(whole_B1 > 0, mass_B1 / whole_B1, 0.0)
        left_BTV[batch_B, parent_B] = p_BV
        weight_BT = weight_BT.scatter(1, parent_B1, w_B1)
        if tree.kind is NodeKind.WITHOUT_REPLACEMENT:
            column_B1 = column_BT.gather(1, node_B1)
            stays_B1 = q_BK.gather(1, column_B1) * ~on_BT.gather(1, node_B1)
            q_BK = q_BK.scatter_(1, column_B1, stays_B1)
            q_BK = q_BK / q_BK.sum(-1, keepdim=True).clamp(min=1.0 / _HUGE)
            q_BTK[batch_B, parent_B] = q_BK
        # The next sibling, and the first children below it, are entered now.
        next_B1 = plan.next_BT.gather(1, node_B1)
        at_B1 = next_B1.clamp(min=0)
        q_x_B1 = q_BK.gather(1, column_BT.gather(1, at_B1)) * on_BT.gather(1, at_B1)
        ratio_B1 = _ratio(w_B1 * p_BV.gather(1, token_BT.gather(1, at_B1)), q_x_B1)
        entry_BT = torch.minimum(low_BT, ratio_B1.clamp(max=1.0) * slope_BT)
        weight_BT = torch.where(plan.top_BT == next_B1, entry_BT, weight_BT)
    end_B = end_B1[:, 0]
    next_B = draw(row(left_BTV, end_B), row(p_BTV, end_B), noise)
    return tree_verdict(tree, ancestor_BTT, end_B, next_B)


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    """p / q, 0 where q is 0: such a token was not drawn from q and is never accepted."""
    return torch.where(q > 0, p / q.clamp(min=1.0 / _HUGE), 0.0)


def _first_child_weights(
    tree: DraftTree, p_BTV: Tensor, law: DraftLaw, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """A and B, each [B, T]: entered below `top` with weight w, a node has weight min(A, w B)."""
    fed_BN = tree.parent_BN + 1
    token_BN = tree.token_BN.clamp(min=0)
    p_BN = p_BTV.flatten(1).gather(1, fed_BN * p_BTV.shape[2] + token_BN)
    ratio_BN = _ratio(p_BN, law.of_token(fed_BN))
    ratio_BT = torch.nn.functional.pad(ratio_BN, (1, 0), value=1.0)
    low_BT = torch.ones_like(ratio_BT)
    slope_BT = torch.ones_like(ratio_BT)
    for _ in range(tree.depth):
        up_BT = low_BT.gather(1, plan.parent_BT) * ratio_BT
        low_BT = torch.where(plan.first_BT, up_BT.clamp(max=1.0), 1.0)
        up_BT = slope_BT.gather(1, plan.parent_BT) * ratio_BT
        slope_BT = torch.where(plan.first_BT, up_BT.clamp(max=_HUGE), 1.0)
    return low_BT, slope_BT


def _plan(tree: DraftTree, ancestor_BTT: Tensor) -> _Plan:
    """Post-order of every row: a node stands after everything below its earlier siblings, the
    earlier siblings of its ancestors, and itself."""
    T = tree.num_nodes + 1
    valid_BT = tree.fed_valid_BT()
    before_BTT = earlier_sibling(tree)
    size_BT = (ancestor_BTT & valid_BT[:, :, None]).sum(1)
    skipped_BT = (before_BTT * size_BT[:, None]).sum(-1)
    place_BT = (ancestor_BTT * skipped_BT[:, None]).sum(-1) + size_BT - 1
    place_BT = torch.where(valid_BT, place_BT, T)
    order_BN = place_BT[:, 1:].argsort(1) + 1
    index_BT = torch.arange(T, device=valid_BT.device).expand_as(place_BT)
    parent_BT = torch.where(valid_BT, tree.fed_parent_BT(), index_BT)  # padding disturbs nobody
    first_BT = ~before_BTT.any(-1) & valid_BT & (index_BT > 0)
    top_BT = torch.where(first_BT, parent_BT, index_BT)
    for _ in range(max(tree.depth, 1).bit_length()):
        top_BT = top_BT.gather(1, top_BT)
    later_BTT = before_BTT.transpose(1, 2)
    key_BTT = torch.where(later_BTT, draw_key(tree)[:, None], T * T)
    next_BT = torch.where(later_BTT.any(-1), key_BTT.argmin(-1), -1)
    return _Plan(order_BN, parent_BT, next_BT, first_BT, top_BT)
