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
Letters: B rows, K draft vocabulary, N nodes, T fed tokens, V target vocabulary, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.block import block
from specctl.runtime.verify.chain import bonus_only
from specctl.runtime.verify.walk import (
    SAMPLED,
    DraftDistribution,
    Rule,
    Verdict,
    draw,
    draw_key,
    earlier_sibling,
    row,
    tree_verdict,
)

_HUGE, _TINY = 1e30, 1e-30


def traversal(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """The accepted path and a token from what is left of the distribution at its end."""
    if tree.is_chain:
        return block(tree, scores_BTV, noise)
    return traverse(tree, scores_BTV, noise)


def traverse(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """`traversal` without the short cut for chains."""
    if not tree.num_nodes:
        return bonus_only(scores_BTV, noise)
    p_BTV = scores_BTV.softmax(-1)
    distribution = DraftDistribution.of(tree, p_BTV)
    ancestor_BTT = tree.ancestor_BTT()
    plan = _plan(tree, ancestor_BTT)
    u_BT = noise.accept_BT(tree.num_nodes + 1).to(p_BTV.dtype)
    u_BT = u_BT.masked_fill(~tree.fed_valid_BT(), 2.0)  # padding never passes
    left_BTV, passes_BN = _visit(tree, p_BTV, distribution, plan, u_BT.gather(1, plan.order_BN))
    first_B1 = passes_BN.int().argmax(1, keepdim=True)
    end_B = torch.where(passes_BN.any(1), plan.order_BN.gather(1, first_B1)[:, 0], 0)
    next_B = draw(row(left_BTV, end_B), row(p_BTV, end_B), noise)
    return tree_verdict(tree, ancestor_BTT, end_B, next_B)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The shape of the walk.

    order_BN   fed indices in post-order, padding last, the root left out
    parent_BT  fed index of the parent; padding is its own parent, where it disturbs nobody
    next_BT    the next drawn sibling, -1 = none
    first_BT   whether it is a first child
    top_BT     the highest fed token reached by going up through first children only
    """

    order_BN: Tensor
    parent_BT: Tensor
    next_BT: Tensor
    first_BT: Tensor
    top_BT: Tensor


def _visit(
    tree: DraftTree, p_BTV: Tensor, distribution: DraftDistribution, plan: _Plan, u_BN: Tensor
) -> tuple[Tensor, Tensor]:
    """What is left of every node's distribution, [B, T, V], and by post-order step whether a node
    passes its test, [B, up to N] - as if every test before had failed. The path ends at the first
    test that passes; later steps touch ancestors of later nodes only, never that node."""
    B, T, V = p_BTV.shape
    K = distribution.prob_BTK.shape[2]
    low_BT, slope_BT = _first_child_weights(tree, p_BTV, distribution, plan)
    weight_BT = torch.minimum(low_BT, slope_BT)
    parent_BN = plan.parent_BT.gather(1, plan.order_BN)
    base_B1 = torch.arange(B, device=p_BTV.device)[:, None] * T
    parent_NB = (parent_BN + base_B1).T.contiguous()
    next_BN = plan.next_BT.gather(1, plan.order_BN)
    entered_BNT = plan.top_BT[:, None] == next_BN[:, :, None]
    # Column K of q stays zero: tokens outside its support stand there.
    column_BT = pad(distribution.column_BN.masked_fill(~distribution.on_BN, K), (1, 0))
    token_BT = pad(tree.token_BN.clamp(min=0), (1, 0))
    column_BN = column_BT.gather(1, plan.order_BN)
    next_column_BN = column_BT.gather(1, next_BN.clamp(min=0))
    next_token_BN = token_BT.gather(1, next_BN.clamp(min=0))
    left_XV, q_XK = p_BTV.flatten(0, 1).clone(), pad(distribution.prob_BTK, (0, 1)).flatten(0, 1)
    passes: list[Tensor] = []
    ended_B1, is_on_cpu = torch.zeros_like(base_B1, dtype=torch.bool), p_BTV.device.type == "cpu"
    for n in range(tree.num_nodes):
        step = slice(n, n + 1)
        passes.append(u_BN[:, step] < weight_BT.gather(1, plan.order_BN[:, step]))
        if is_on_cpu:  # a read costs nothing there; what follows the last path is idle
            ended_B1 = ended_B1 | passes[-1]
            if bool(ended_B1.all()):
                break
        w_B1, at_B = weight_BT.gather(1, parent_BN[:, step]), parent_NB[n]
        q_BK = q_XK.index_select(0, at_B)
        p_BV = distribution.minus(left_XV.index_select(0, at_B).mul_(w_B1), q_BK[:, :K])
        mass_B1 = p_BV.sum(-1, keepdim=True)
        left_XV.index_copy_(0, at_B, p_BV.div_(mass_B1.clamp(min=_TINY)))
        w_B1 = mass_B1 / (mass_B1 + (1.0 - w_B1)).clamp_(min=_TINY)
        weight_BT = weight_BT.scatter(1, parent_BN[:, step], w_B1)
        if tree.kind.is_distinct:
            q_BK.scatter_(1, column_BN[:, step], 0.0)
            q_XK.index_copy_(0, at_B, q_BK.div_(q_BK.sum(-1, keepdim=True).clamp_(min=_TINY)))
        # The next sibling, and the first children below it, are entered now.
        p_x_B1 = w_B1 * p_BV.gather(1, next_token_BN[:, step])
        entry_B1 = _ratio(p_x_B1, q_BK.gather(1, next_column_BN[:, step])).clamp_(max=1.0)
        entry_BT = torch.minimum(low_BT, entry_B1 * slope_BT)
        weight_BT = torch.where(entered_BNT[:, n], entry_BT, weight_BT)
    return left_XV.view(B, T, V), torch.cat(passes, dim=1)


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    """p / q, 0 where q is 0: such a token was not drawn from q and is never accepted."""
    return torch.where(q > 0, p / q.clamp(min=_TINY), 0.0)


def _first_child_weights(
    tree: DraftTree, p_BTV: Tensor, distribution: DraftDistribution, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """A and B, each [B, T]: entered below `top` with weight w, a node has weight min(A, w B)."""
    fed_BN = tree.parent_BN + 1
    token_BN = tree.token_BN.clamp(min=0)
    p_BN = p_BTV.flatten(1).gather(1, fed_BN * p_BTV.shape[2] + token_BN)
    ratio_BN = _ratio(p_BN, distribution.of_token(fed_BN))
    ratio_BT = pad(ratio_BN, (1, 0), value=1.0)
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


RULE = Rule(
    "traversal",
    "block verification of a tree, from the leaves up",
    "https://arxiv.org/abs/2505.12398",
    traversal,
    scalar.traversal,
    SAMPLED,
)
