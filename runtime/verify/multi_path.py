"""Greedy multi-path block verification: K whole paths drawn alone, the best one block-verified.

Thomas and Pal, arXiv 2602.16961. Order the tokens after every prefix by p/q and the K paths by the
order of their tokens, first token first. The highest path is chosen by p and q alone, so its
distribution is known: with A the probability (under q) of paths below the present prefix, J that of
the prefix, F the distribution function of q in that order,

    q'(x) = [(A + J F(x))^K - (A + J F(x-))^K] / [(A + J)^K - A^K].

Block verification of that path with q' for q is lossless; one path makes it block verification. The
differences of powers are written out as products, which subtract nothing. Letters as in `walk`.
Letters: B rows, K draft vocabulary, N nodes, P path, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.core.tree import DraftTree, NodeKind, QRows, chain_tree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.block import block
from specctl.runtime.verify.chain import bonus_only
from specctl.runtime.verify.walk import DraftDistribution, Rule, Verdict, row, tree_verdict

_TINY = 1e-30


def multi_path(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Choose the path, tell block verification its distribution, and name the path's nodes
    again."""
    if not tree.num_nodes:
        return bonus_only(scores_BTV, noise)
    fed_BP, prob_BPK = _choose(tree, scores_BTV.softmax(-1))
    node_BP = (fed_BP[:, 1:] - 1).clamp(min=0)
    token_BP, is_on_BP = tree.token_BN.gather(1, node_BP), fed_BP[:, 1:] > 0
    ids_K = None if tree.q is None else tree.q.ids_K
    path = chain_tree(token_BP, is_on_BP, tree.kind, QRows(prob_BPK, ids_K))
    index_BPV = fed_BP.clamp(min=0)[:, :, None].expand(-1, -1, scores_BTV.shape[-1])
    verdict = block(path, scores_BTV.gather(1, index_BPV), noise)
    end_B = fed_BP.gather(1, verdict.num_accepted_B[:, None])[:, 0]
    return tree_verdict(tree, tree.ancestor_BTT(), end_B, verdict.next_token_B)


def _choose(tree: DraftTree, p_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """The highest path as fed indices [B, P], -1 behind its end, and its distribution along it [B,
    P, K]."""
    distribution = DraftDistribution.of(tree, p_BTV)
    is_root_BN = tree.valid_BN & (tree.parent_BN < 0)
    num_B1 = is_root_BN.sum(1, keepdim=True)
    most = tree.num_nodes - tree.depth + 1  # a bound: one path is as deep, the others have a node
    at_B = tree.token_BN.new_zeros(tree.token_BN.shape[0])
    below_B1, here_B1 = torch.zeros_like(p_BTV[:, 0, :1]), torch.ones_like(p_BTV[:, 0, :1])
    alive_BN, path_BN, feds, distributions = is_root_BN, tree.rank_BN, [at_B], []
    for _ in range(tree.depth):
        p_BK, q_BK = distribution.on_support(row(p_BTV, at_B)), row(distribution.prob_BTK, at_B)
        rank_BK, upto_BK = _order(p_BK, q_BK)
        high_BK = below_B1 + here_B1 * upto_BK
        low_BK = high_BK - here_B1 * q_BK
        skew_BK = q_BK * _powers(high_BK, low_BK, num_B1, most)
        whole_B1 = _powers(below_B1 + here_B1, below_B1, num_B1, most)
        distributions.append(skew_BK / whole_B1.clamp(min=_TINY))
        rank_BN = torch.where(distribution.on_BN, rank_BK.gather(1, distribution.column_BN) + 1, 0)
        first_BN = (rank_BN + 1) * tree.num_nodes - path_BN  # of equal tokens the first path's
        best_B1 = first_BN.masked_fill(~alive_BN, -1).argmax(1, keepdim=True)
        same_BN = alive_BN & (tree.token_BN == tree.token_BN.gather(1, best_B1))
        some_B1 = alive_BN.any(1, keepdim=True)
        column_B1 = distribution.column_BN.gather(1, best_B1)
        below_B1 = low_BK.gather(1, column_B1).clamp(min=0.0)
        here_B1 = here_B1 * q_BK.gather(1, column_B1)
        feds.append(torch.where(some_B1, best_B1 + 1, -1)[:, 0])
        at_B = torch.where(some_B1, best_B1 + 1, at_B[:, None])[:, 0]
        alive_BN = tree.valid_BN & pad(same_BN, (1, 0)).gather(1, tree.parent_BN + 1)
        path_BN = pad(path_BN, (1, 0)).gather(1, tree.parent_BN + 1)
    distributions.append(torch.zeros_like(distributions[0]))
    return torch.stack(feds, 1), torch.stack(distributions, 1)


def _order(p_BK: Tensor, q_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's place in ascending order of p/q (the lower id first among equals), and the
    probability under q of tokens up to and with it."""
    ratio_BK = torch.where(q_BK > 0, p_BK / q_BK.clamp(min=_TINY), -1.0)
    order_BK = ratio_BK.argsort(dim=1, stable=True)
    rank_BK = order_BK.argsort(1)
    upto_BK = q_BK.gather(1, order_BK).cumsum(1).gather(1, rank_BK)
    return rank_BK, upto_BK


def _powers(high: Tensor, low: Tensor, num_B1: Tensor, most: int) -> Tensor:
    """(high^K - low^K) / (high - low) = sum over i < K of high^i low^(K - 1 - i)."""
    total, power = torch.ones_like(high), torch.ones_like(low)
    for i in range(1, most):
        power = power * low
        total = torch.where(num_B1 > i, total * high + power, total)
    return total


RULE = Rule(
    "multi-path",
    "block verification of the best of whole paths",
    "https://arxiv.org/abs/2602.16961",
    multi_path,
    scalar.multi_path,
    {NodeKind.PATHS},
)
