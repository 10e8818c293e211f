"""Greedy verification: follow the child that equals the target's argmax, stop at the first miss.

Lossless for any drafts: the output is the target's argmax decoding. Letters as in `walk`.
Letters: B rows, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.walk import (
    ANY,
    Rule,
    Verdict,
    chain_verdict,
    deepest_ok,
    root_verdict,
    tree_verdict,
)


def greedy(tree: DraftTree, scores_BTV: Tensor, noise: Noise | None = None) -> Verdict:
    """The path of drafted tokens that are the argmax after their own prefix."""
    return follow(tree, best_token(scores_BTV))


def follow(tree: DraftTree, choice_BT: Tensor) -> Verdict:
    """Walk along the target's choices, one per fed token. Duplicate drafts are harmless."""
    if tree.num_nodes == 0:
        return root_verdict(choice_BT[:, 0])
    return kept(tree, hits(tree, choice_BT), choice_BT)


def hits(tree: DraftTree, choice_BT: Tensor) -> Tensor:
    """[B, N]: nodes that are the target's choice behind their parent."""
    wanted_BN = choice_BT[:, :-1]
    if not tree.is_chain:
        wanted_BN = choice_BT.gather(1, tree.parent_BN + 1)
    return (tree.token_BN == wanted_BN) & tree.valid_BN


def kept(tree: DraftTree, ok_BN: Tensor, choice_BT: Tensor) -> Verdict:
    """The deepest node that is ok with all above it, and the target's choice behind it."""
    if tree.is_chain:
        num_accepted_B = ok_BN.cumprod(1).sum(1)
        next_B = choice_BT.gather(1, num_accepted_B[:, None])[:, 0]
        return chain_verdict(num_accepted_B, next_B, tree.depth)
    ancestor_BTT = tree.ancestor_BTT()
    ok_BT = torch.nn.functional.pad(ok_BN, (1, 0), value=True)
    node_B = deepest_ok(ok_BT, ancestor_BTT)
    next_B = choice_BT.gather(1, node_B[:, None])[:, 0]
    return tree_verdict(tree, ancestor_BTT, node_B, next_B)


RULE = Rule(
    "greedy",
    "follow the argmax (temperature 0)",
    "https://arxiv.org/abs/2211.17192",
    greedy,
    scalar.greedy,
    ANY,
)
