"""One-hot verification of deterministic candidates, sibling by sibling (the rule of EAGLE-2).

At a node with distribution r = p: accept sibling t with probability r(t) / sum r, else r(t) := 0;
after the last miss draw from r. A node is left by one of its drafts with probability p(children),
as in `target-only`, for one uniform per sibling instead of a draw per node. Letters as in `walk`.
Letters: B rows, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, NodeKind
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.walk import (
    Rule,
    Verdict,
    at_token,
    chain_verdict,
    deepest_ok,
    draw,
    earlier_sibling,
    row,
    tree_verdict,
)


def one_hot(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Every sibling is tested at once: what it competes with is known without walking."""
    p_BTV = scores_BTV.softmax(-1)
    token_BN = tree.token_BN.clamp(min=0)
    u_BN = noise.accept_BT(tree.num_nodes + 1)[:, 1:].to(p_BTV.dtype)
    if tree.is_chain:
        pass_BN = (u_BN < at_token(p_BTV[:, :-1], token_BN)) & tree.valid_BN
        num_accepted_B = pass_BN.cumprod(1).sum(1)
        tested_BN = tree.valid_BN & (tree.parent_BN + 1 == num_accepted_B[:, None])
        next_B = _last(p_BTV, num_accepted_B, token_BN, tested_BN, noise)
        return chain_verdict(num_accepted_B, next_B, tree.depth)
    ancestor_BTT = tree.ancestor_BTT()
    prob_BN = p_BTV.flatten(1).gather(1, (tree.parent_BN + 1) * p_BTV.shape[2] + token_BN)
    pass_BN = _passes(tree, prob_BN, u_BN)
    ok_BT = torch.nn.functional.pad(pass_BN, (1, 0), value=True)
    node_B = deepest_ok(ok_BT, ancestor_BTT)
    tested_BN = tree.valid_BN & (tree.parent_BN + 1 == node_B[:, None])
    next_B = _last(p_BTV, node_B, token_BN, tested_BN, noise)
    return tree_verdict(tree, ancestor_BTT, node_B, next_B)


def _passes(tree: DraftTree, prob_BN: Tensor, u_BN: Tensor) -> Tensor:
    """[B, N]: the node is the first of its siblings to pass its test. A repeated token has nothing
    left to win."""
    before_BNN = earlier_sibling(tree)[:, 1:, 1:]
    equal_BNN = tree.token_BN[:, :, None] == tree.token_BN[:, None]
    prob_BN = prob_BN.masked_fill((before_BNN & equal_BNN).any(-1), 0.0)
    mass_BN = 1.0 - (before_BNN * prob_BN[:, None]).sum(-1)
    pass_BN = (u_BN * mass_BN < prob_BN) & (prob_BN > 0) & tree.valid_BN
    return pass_BN & ~(before_BNN & pass_BN[:, None]).any(-1)


def _last(
    p_BTV: Tensor, node_B: Tensor, token_BN: Tensor, tested_BN: Tensor, noise: Noise
) -> Tensor:
    """Draw from the distribution at the last node without the children that were tested and
    missed."""
    distribution_BV = row(p_BTV, node_B)
    missed_BV = torch.zeros_like(distribution_BV).scatter_add_(
        1, token_BN, tested_BN.to(distribution_BV.dtype)
    )
    return draw(distribution_BV.masked_fill(missed_BV > 0, 0.0), distribution_BV, noise)


RULE = Rule(
    "one-hot",
    "test candidates one by one",
    "https://arxiv.org/abs/2406.16858",
    one_hot,
    scalar.one_hot,
    {NodeKind.POINT},
)
