"""Token-level verification of a sampled chain: speculative sampling.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): accept x_i if
u_i q_i(x_i) < p_i(x_i); at the first miss draw from norm([p_i - q_i]+), else a bonus from p.
Letters as in `walk`.
Letters: B rows, K draft vocabulary, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.walk import (
    SAMPLED,
    DraftDistribution,
    Rule,
    Verdict,
    at_token,
    chain_verdict,
    draw,
    root_verdict,
    row,
)


def chain(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """The accepted prefix and its correction or bonus token."""
    if not tree.num_nodes:
        return bonus_only(scores_BTV, noise)
    p_BTV = scores_BTV.softmax(-1)
    distribution = DraftDistribution.of(tree, p_BTV)
    p_BN = at_token(p_BTV[:, :-1], tree.token_BN.clamp(min=0))
    q_BN = distribution.of_token()
    u_BN = noise.accept_BT(tree.num_nodes + 1)[:, 1:].to(p_BTV.dtype)
    pass_BN = (u_BN * q_BN < p_BN) & (q_BN > 0) & tree.valid_BN
    num_accepted_B = pass_BN.cumprod(1).sum(1)
    missed_B1 = (num_accepted_B < tree.valid_BN.sum(1))[:, None]
    p_BV, q_BK = row(p_BTV, num_accepted_B), row(distribution.prob_BTK, num_accepted_B)
    next_B = draw(distribution.minus(p_BV, q_BK * missed_B1), p_BV, noise)
    return chain_verdict(num_accepted_B, next_B, tree.depth)


def bonus_only(scores_BTV: Tensor, noise: Noise) -> Verdict:
    """Nothing was drafted: draw the next token from p. It is the draw of log p, which differs from
    the scores by a number for each row."""
    return root_verdict(noise.final_draw_B(scores_BTV[:, 0]))


RULE = Rule(
    "chain",
    "token-level speculative sampling",
    "https://arxiv.org/abs/2211.17192",
    chain,
    scalar.chain,
    SAMPLED,
    chains_only=True,
)
