"""Grouped speculative decoding (arXiv 2508.07747): similar tokens are accepted as one.

Where many tokens are as good as each other, as codes of images are, a draft x that was drawn from q
stands with probability

    min(1, sum of p over G / sum of q over G)

in the place of min(1, p(x) / q(x)). The group G of x are the tokens within `size` ranks of it in
the order of p, of which only those count whose p is within `spread` of p(x). The first draft that
does not stand is drawn anew from norm([p - q]+), as in speculative sampling, whose rule this is
with `size` 0. The published rule leaves out of G what is far from x in the codebook, too; a rule
sees no codebook here. Approximate.
Letters: B rows, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify.relaxed.base import Knob, RelaxedRule
from specctl.runtime.verify.walk import (
    DraftDistribution,
    Verdict,
    at_token,
    chain_verdict,
    draw,
    drawn_from_numbers,
    row,
)


def judges(tree: DraftTree, scores_BTV: Tensor, noise: Noise, values: Sequence[float]) -> Verdict:
    """The accepted prefix of a sampled chain, and its correction or bonus token."""
    tree, p_BTV = drawn_from_numbers(tree), scores_BTV.softmax(-1)
    distribution, token_BN = DraftDistribution.of(tree, p_BTV), tree.token_BN.clamp(min=0)
    p_BNV, q_BNV = p_BTV[:, :-1], over_vocabulary(distribution, p_BTV)[:, :-1]
    near_BNV = group(p_BNV, token_BN, *values)
    p_BN, q_BN = ((each * near_BNV).sum(-1) for each in (p_BNV, q_BNV))
    u_BN = noise.accept_BT(tree.num_nodes + 1)[:, 1:].to(p_BTV.dtype)
    could_BN = (at_token(p_BNV, token_BN) > 0) & (distribution.of_token() > 0)
    pass_BN = (u_BN * q_BN < p_BN) & could_BN & tree.valid_BN
    num_accepted_B = pass_BN.cumprod(1).sum(1)
    missed_B1 = (num_accepted_B < tree.valid_BN.sum(1))[:, None]
    p_BV, q_BK = row(p_BTV, num_accepted_B), row(distribution.prob_BTK, num_accepted_B)
    next_B = draw(distribution.minus(p_BV, q_BK * missed_B1), p_BV, noise)
    return chain_verdict(num_accepted_B, next_B, tree.depth)


def group(p_BNV: Tensor, token_BN: Tensor, size: float, spread: float) -> Tensor:
    """bool [B, N, V]: the group of each node's token, itself among it."""
    rank_BNV = p_BNV.argsort(dim=-1, stable=True).argsort(dim=-1)
    own_BN1 = rank_BNV.gather(2, token_BN[:, :, None])
    p_BN1 = p_BNV.gather(2, token_BN[:, :, None])
    is_near_BNV = (rank_BNV - own_BN1).abs() <= size
    return is_near_BNV & ((p_BNV - p_BN1).abs() <= spread)


def over_vocabulary(distribution: DraftDistribution, p_BTV: Tensor) -> Tensor:
    """[B, T, V]: q at every token of the target."""
    if distribution.ids_K is None:
        return distribution.prob_BTK
    ids_BTK = distribution.ids_K.expand_as(distribution.prob_BTK)
    return torch.zeros_like(p_BTV).scatter_(2, ids_BTK, distribution.prob_BTK)


def stands(tree: DraftTree, hit_BN: Tensor, scores_BNV: Tensor, values: Sequence[float]) -> Tensor:
    """[B, N]: of greedy rows, no node that the target did not choose."""
    return torch.zeros_like(hit_BN)


RELAXED = RelaxedRule(
    "grouped",
    "a sampled draft stands by the probability of all tokens about as likely as it",
    "https://arxiv.org/abs/2508.07747",
    stands,
    (Knob("size", 7), Knob("spread", 0.15, most=1.0)),
    chains_only=True,
    native="chain",
    judges=judges,
)
