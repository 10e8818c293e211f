"""Block verification of a sampled chain: accepts at least as much as token-level, for free.

Sun et al., "Block verification accelerates speculative decoding" (arXiv 2403.10444), Algorithm 2.
With w_0 = 1 and w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), the prefix of length i passes if
u_i < h_i, where h_i = m_i / (m_i + 1 - w_i), m_i = sum_x [w_i p_{i+1}(x) - q_{i+1}(x)]+, and
h_g = w_g at the end. The longest passing prefix is kept (every test is made: a short prefix that
fails tells nothing about a longer one); then draw from norm([w p - q]+), or from p at the end.
Letters as in `walk`.
Letters: B rows, K draft vocabulary, M new nodes, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.core.tree import DraftTree
from specctl.runtime.sampling.noise import Noise
from specctl.runtime.verify import scalar
from specctl.runtime.verify.chain import bonus_only
from specctl.runtime.verify.walk import (
    SAMPLED,
    DraftDistribution,
    Rule,
    Verdict,
    at_token,
    chain_verdict,
    draw,
    row,
)

_TINY = 1e-30


def block(tree: DraftTree, scores_BTV: Tensor, noise: Noise) -> Verdict:
    """The longest passing prefix and its correction or bonus token."""
    if not tree.num_nodes:
        return bonus_only(scores_BTV, noise)
    p_BTV = scores_BTV.softmax(-1)
    N = tree.num_nodes
    distribution = DraftDistribution.of(tree, p_BTV)
    weight_BT = _weights(
        at_token(p_BTV[:, :-1], tree.token_BN.clamp(min=0)), distribution.of_token()
    )
    length_B1 = tree.valid_BN.sum(1, keepdim=True)
    index_N = torch.arange(1, N + 1, device=p_BTV.device)
    threshold_BN = torch.where(
        index_N == length_B1, weight_BT[:, 1:], _thresholds(weight_BT, p_BTV, distribution)
    )
    u_BN = noise.accept_BT(N + 1)[:, 1:].to(p_BTV.dtype)
    pass_BN = (u_BN < threshold_BN) & tree.valid_BN
    num_accepted_B = (pass_BN * index_N).amax(1)
    at_B1 = num_accepted_B[:, None]
    q_BK = row(distribution.prob_BTK, num_accepted_B) * (at_B1 < length_B1)
    p_BV = row(p_BTV, num_accepted_B)
    next_B = draw(distribution.minus(p_BV * weight_BT.gather(1, at_B1), q_BK), p_BV, noise)
    return chain_verdict(num_accepted_B, next_B, tree.depth)


def _weights(p_BN: Tensor, q_BN: Tensor) -> Tensor:
    """[B, T]: w_0 .. w_N. log w_i = S_i - max(S_0 .. S_i), S the running sum of log p/q with S_0 =
    0, which is the recursion with min(1, .) solved in one scan."""
    ratio_BN = torch.where(q_BN > 0, p_BN / q_BN.clamp(min=_TINY), 0.0)
    sum_BT = torch.nn.functional.pad(ratio_BN.log().cumsum(1), (1, 0))
    return (sum_BT - sum_BT.cummax(1).values).exp()


def _thresholds(weight_BT: Tensor, p_BTV: Tensor, distribution: DraftDistribution) -> Tensor:
    """[B, N]: h_1 .. h_{N-1} of the look-ahead rows; the last column (never read) is zero."""
    w_BM1 = weight_BT[:, 1:-1, None]
    ahead_BMV, q_BMK = p_BTV[:, 1:-1], distribution.prob_BTK[:, 1:-1]
    if distribution.ids_K is None:
        mass_BM = (w_BM1 * ahead_BMV - q_BMK).clamp_(min=0).sum(-1)
    else:
        on_BMK = ahead_BMV.gather(2, distribution.ids_K.expand_as(q_BMK))  # 10 times index_select
        off_BM = (1.0 - on_BMK.sum(-1)).clamp_(min=0)
        mass_BM = (w_BM1 * on_BMK - q_BMK).clamp_(min=0).sum(-1) + w_BM1[:, :, 0] * off_BM
    whole_BM = mass_BM + (1.0 - w_BM1[:, :, 0])
    threshold_BM = torch.where(whole_BM > 0, mass_BM / whole_BM, 0.0)
    return torch.nn.functional.pad(threshold_BM, (0, 1))


RULE = Rule(
    "block",
    "block verification, the best for one chain",
    "https://arxiv.org/abs/2403.10444",
    block,
    scalar.block,
    SAMPLED,
    chains_only=True,
)
