"""Acceptance and tau of a drafter at every vocabulary size at once, from chains along true text.

With the k best-ranked ids kept, the draft distribution is q_k(v) = q(v) / Q_k inside them, Q_k
their mass. Rejection sampling accepts a draft that is the target's token y with chance w_k = min(1,
q_k(y) / p(y)); given the text that was written, these events are independent. So the expected
number of rounds spent on a text follows from a walk over its roots: a round that accepts n of its
drafts goes n + 1 tokens further. Greedily both distributions are one-hot and w_k is 0 or 1: y is
drafted exactly while it is kept and no kept id has a larger logit, an interval of k. For chains
verified token by token the walk is exact; block verification accepts a little more, trees are
scaled to their measured tau.
Letters: R roots, L drafted tokens, K draft vocabulary, N sizes, M rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.vocab import VocabMap
from specctl.train.vocab.chains import ScoredChain

CHUNK_ELEMENTS = 2**23


@dataclass(frozen=True, slots=True)
class Ranked:
    """Ids of a draft vocabulary, the first to keep first, as rows of the draft head: `row_K` is the
    draft row of each rank, `rank_V` the rank of each target id (len(row_K) = never kept)."""

    row_K: Tensor
    rank_V: Tensor

    @classmethod
    def of(cls, rank: Tensor, vocab: VocabMap | None, target_size: int) -> Ranked:
        """From target ids in the order in which they are kept."""
        rank_V = torch.full((target_size,), rank.numel(), dtype=torch.long)
        rank_V[rank.cpu()] = torch.arange(rank.numel())
        if vocab is None:
            return cls(rank, rank_V.to(rank.device))
        return cls(vocab.to_draft().to(rank.device)[rank], rank_V.to(rank.device))

    def to(self, device: torch.device) -> Ranked:
        return Ranked(self.row_K.to(device), self.rank_V.to(device))


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """Expected rounds, accepted and tested drafts of some text, by size (float64 [N] each)."""

    sizes: tuple[int, ...]
    tokens: int
    rounds_N: Tensor
    accepted_N: Tensor
    tested_N: Tensor

    @property
    def tau_N(self) -> Tensor:
        return self.tokens / self.rounds_N

    @property
    def alpha_N(self) -> Tensor:
        return self.accepted_N / self.tested_N.clamp(min=1e-12)

    def __add__(self, other: SizeCurve) -> SizeCurve:
        assert self.sizes == other.sizes, "curves over other sizes"
        return SizeCurve(
            self.sizes,
            self.tokens + other.tokens,
            self.rounds_N + other.rounds_N,
            self.accepted_N + other.accepted_N,
            self.tested_N + other.tested_N,
        )


def size_curves(
    chains: Iterable[ScoredChain],
    ranked: Ranked,
    sizes: Sequence[int],
    temperature: float = 0.0,
    length: int | None = None,
) -> dict[str, SizeCurve]:
    """Domain -> curve. `length` shortens the drafts of the captured chains."""
    found: dict[str, SizeCurve] = {}
    for chain in chains:
        curve = walk(chain, passing(chain, ranked, sizes, temperature), sizes, length)
        before = found.get(chain.domain)
        found[chain.domain] = curve if before is None else before + curve
    return found


def passing(
    chain: ScoredChain, ranked: Ranked, sizes: Sequence[int], temperature: float = 0.0
) -> Tensor:
    """[R, L, N]: w_k, the chance that the draft behind root r and l tokens is the true next token
    and is accepted."""
    R, L, K = chain.draft_RLK.shape
    ranked = ranked.to(chain.label_R.device)
    at_RL = torch.arange(R)[:, None] + torch.arange(L)
    inside_RL = (at_RL < R).to(chain.label_R.device)
    at_RL = at_RL.clamp(max=R - 1).to(chain.label_R.device)
    label_M = chain.label_R[at_RL].flatten()
    size_N = torch.tensor(sizes, device=label_M.device)
    draft_MK, at_M = chain.draft_RLK.flatten(0, 1), at_RL.flatten()
    step = max(1, CHUNK_ELEMENTS // K)
    parts = []
    for rows in torch.split(torch.arange(R * L, device=label_M.device), step):
        draft, label = draft_MK[rows], label_M[rows]
        if temperature == 0.0:
            one = len(sizes) == 1
            part = (_greedy_one if one else _greedy)(draft, label, ranked, size_N)
        else:
            target_MV = chain.target_RV[at_M[rows]]
            part = _sampled(draft, target_MV, label, ranked, size_N, temperature)
        parts.append(part)
    return torch.cat(parts).view(R, L, -1) * inside_RL[:, :, None]


def _greedy(draft_MK: Tensor, label_M: Tensor, ranked: Ranked, size_N: Tensor) -> Tensor:
    """Kept, and beaten by no kept id (equal logits: the lower draft row wins, as in an argmax)."""
    in_order_MK = draft_MK[:, ranked.row_K]
    rank_M = ranked.rank_V[label_M]
    is_known_M = rank_M < ranked.row_K.numel()
    own_M1 = rank_M.clamp(max=ranked.row_K.numel() - 1)[:, None]
    logit_M1 = in_order_MK.gather(1, own_M1)
    ties_MK = (in_order_MK == logit_M1) & (ranked.row_K < ranked.row_K[own_M1])
    beats_MK = (in_order_MK > logit_M1) | ties_MK
    none_M = ~beats_MK.any(-1)
    until_M = beats_MK.int().argmax(-1).masked_fill(none_M, ranked.row_K.numel())
    hit_MN = (size_N > rank_M[:, None]) & (size_N <= until_M[:, None]) & is_known_M[:, None]
    return hit_MN.double()


def _greedy_one(draft_MK: Tensor, label_M: Tensor, ranked: Ranked, size_N: Tensor) -> Tensor:
    """The same for a single size, without bringing the logits into order."""
    kept_K = torch.full_like(draft_MK[0], -torch.inf)
    kept_K[ranked.row_K[: int(size_N[0])]] = 0.0
    rank_M = ranked.rank_V[label_M].clamp(max=ranked.row_K.numel() - 1)
    is_known_M = ranked.rank_V[label_M] < size_N[0]
    first_M = (draft_MK + kept_K).argmax(-1)
    return ((first_M == ranked.row_K[rank_M]) & is_known_M)[:, None].double()


def _sampled(
    draft_MK: Tensor,
    target_MV: Tensor,
    label_M: Tensor,
    ranked: Ranked,
    size_N: Tensor,
    temperature: float,
) -> Tensor:
    q_MK = (draft_MK[:, ranked.row_K].double() / temperature).softmax(-1)
    mass_MN = q_MK.cumsum(-1)[:, size_N - 1]
    p_M = (target_MV.double() / temperature).softmax(-1).gather(1, label_M[:, None])[:, 0]
    rank_M = ranked.rank_V[label_M]
    q_M = q_MK.gather(1, rank_M.clamp(max=q_MK.shape[1] - 1)[:, None])[:, 0]
    share_MN = (q_M[:, None] / (mass_MN * p_M[:, None]).clamp(min=1e-300)).clamp(max=1.0)
    return share_MN * (size_N > rank_M[:, None])


def walk(
    chain: ScoredChain, pass_RLN: Tensor, sizes: Sequence[int], length: int | None = None
) -> SizeCurve:
    """Expected rounds over the answer: flow[r] is the chance that a round starts at root r."""
    R, L, N = pass_RLN.shape
    pass_RLN = pass_RLN.cpu()
    flow = torch.zeros(R + 1, N, dtype=torch.float64)
    flow[0] = 1.0
    accepted_N, tested_N = torch.zeros(2, N, dtype=torch.float64)
    most = L if length is None else min(length, L)
    for root in range(R):
        alive_N, depth = flow[root], min(chain.depth_R[root], most)
        for step in range(depth):
            tested_N += alive_N
            next_N = alive_N * pass_RLN[root, step]
            flow[root + step + 1] += alive_N - next_N
            accepted_N += next_N
            alive_N = next_N
        flow[min(root + depth + 1, R)] += alive_N
    return SizeCurve(tuple(sizes), R, flow[:R].sum(0), accepted_N, tested_N)
