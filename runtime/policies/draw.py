"""How the children of expanded nodes are chosen, and the distributions that go with them.

Greedy and target-only rows take the best tokens (POINT). Sampled rows draw, without replacement by
Gumbel top-k (the decreasing noisy scores are a draw order; REFILLED goes on uniformly over the
untried tokens once a distribution has run out) or independently with duplicates kept.
Whatever a policy decides about a child must follow from earlier children, never from the token that
this child turns out to be. Of the kinds IID, PATHS and TOP_PLUS_ONE not even how many children a
node gets may follow from those children: spectr, multi-path and top-plus-one weigh each of them by
their number, which must be settled before the first is drawn.
Letters: B rows, C candidates, K draft vocabulary, M new nodes, N nodes, R flat rows, T fed tokens,
X any axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specctl.core.tree import NodeKind, QRows
from specctl.runtime.policies.base import GrowRequest
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.verify.walk import log_distribution

# Log weight of what is drawn once a distribution has run out: behind everything in its support
# (log of the smallest float32 is -104), and small enough that noise keeps its digits beside it.
_LAST = -256.0


@dataclass(frozen=True, slots=True)
class Children:
    """Draft rows [B, M, C] in draw order, which of them were really drawn (a distribution may run
    out), and the distribution they were drawn from (None for POINT)."""

    row_BMC: Tensor
    is_drawn_BMC: Tensor
    distribution_BMK: Tensor | None


def draft_distribution(growth: GrowRequest, logits_BMK: Tensor) -> Tensor:
    """The distribution that sampled rows draw from; zero where there is nothing to draft."""
    ids_K = None if growth.vocab is None else growth.vocab.ids_K
    return growth.sampling.draft_distribution(logits_BMK, ids_K)


def log_guess(logits_BMK: Tensor) -> Tensor:
    """log q of deterministic choices; -inf where there is nothing to draft."""
    logp_BMK = logits_BMK.float().log_softmax(-1)
    return logp_BMK.masked_fill(logits_BMK.amax(-1, keepdim=True) == -torch.inf, -torch.inf)


def children(
    growth: GrowRequest, logits_BMK: Tensor, count: int, index: int, kind: NodeKind
) -> Children:
    """`count` children of every node; `index` counts the draws of the round."""
    _, M, K = logits_BMK.shape
    if kind is NodeKind.POINT:
        best = logits_BMK.topk(min(count, K), dim=-1)
        return _padded(best.indices, best.values > -torch.inf, None, count)
    distribution_BMK = draft_distribution(growth, logits_BMK)
    score_BMK = log_distribution(distribution_BMK)
    if kind in (NodeKind.IID, NodeKind.PATHS):
        each_BRK = score_BMK.repeat_interleave(count, dim=1)
        row_BMC = growth.noise.draft_draw_BM(each_BRK, index).view(-1, M, count)
        is_drawn_BM1 = distribution_BMK.amax(-1, keepdim=True) > 0
        return Children(row_BMC, is_drawn_BM1.expand_as(row_BMC), distribution_BMK)
    if kind is NodeKind.TOP_PLUS_ONE:
        return _top_plus_one(distribution_BMK, growth.noise, index, count)
    if kind is NodeKind.REFILLED:
        can_draw_BM1 = distribution_BMK.amax(-1, keepdim=True) > 0
        score_BMK = torch.where(can_draw_BM1, score_BMK.clamp(min=_LAST), score_BMK)
    noisy_BMK = score_BMK + growth.noise.draft_BMK(index, M, K)
    drawn = noisy_BMK.topk(min(count, K), dim=-1)
    return _padded(drawn.indices, drawn.values > -torch.inf, distribution_BMK, count)


def _top_plus_one(distribution_BMK: Tensor, noise: RoundNoise, index: int, count: int) -> Children:
    """The sample first, then the likeliest tokens it may not be. The fixed ones never use a
    distribution up: where they would, the last token of its support is left to the sample."""
    best = distribution_BMK.topk(min(count, distribution_BMK.shape[-1]), dim=-1)
    spared_BM1 = ((best.values > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    at_C = torch.arange(best.indices.shape[-1] - 1, device=distribution_BMK.device)
    fixed_BMC = best.indices.gather(-1, at_C + (at_C >= spared_BM1))
    rest_BMK = distribution_BMK.scatter(-1, fixed_BMC, 0.0)
    sample_BM1 = noise.draft_draw_BM(log_distribution(rest_BMK), index)[:, :, None]
    row_BMC = torch.cat([sample_BM1, fixed_BMC], -1)
    is_drawn_BM1 = distribution_BMK.amax(-1, keepdim=True) > 0
    return _padded(row_BMC, is_drawn_BM1.expand_as(row_BMC), distribution_BMK, count)


def _padded(
    row_BMC: Tensor, is_drawn_BMC: Tensor, distribution: Tensor | None, count: int
) -> Children:
    missing = count - row_BMC.shape[-1]
    if missing <= 0:
        return Children(row_BMC, is_drawn_BMC, distribution)
    return Children(pad(row_BMC, (0, missing)), pad(is_drawn_BMC, (0, missing)), distribution)


def q_rows(
    growth: GrowRequest,
    distributions: Sequence[Tensor | None],
    expanded_BN: Tensor | None,
    num_nodes: int,
) -> QRows | None:
    """The distributions by fed index. `distributions` are in order of expansion, the root's first;
    a node that was never expanded gets a row of zeros. `expanded_BN` None: node i was expansion
    i."""
    known = [distribution for distribution in distributions if distribution is not None]
    if not known:
        return None
    distribution_BXK = torch.cat(known, dim=1)
    B, X, K = distribution_BXK.shape
    ids_K = None if growth.vocab is None else growth.vocab.ids_K
    if expanded_BN is None:
        return QRows(pad(distribution_BXK, (0, 0, 0, num_nodes + 1 - X)), ids_K)
    at_BN = torch.where((expanded_BN >= 0) & (expanded_BN < X - 1), expanded_BN + 1, X)
    at_BT = pad(at_BN, (1, 0))
    filled_BXK = pad(distribution_BXK, (0, 0, 0, 1))
    return QRows(filled_BXK.gather(1, at_BT[:, :, None].expand(B, num_nodes + 1, K)), ids_K)
