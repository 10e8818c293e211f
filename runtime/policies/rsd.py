"""StochasticBeam: RSD-S, a beam of sequences sampled without replacement (arXiv 2402.14160).

Stochastic beam search (Kool et al., arXiv 1903.06059): a sequence with log-probability phi has a
noisy score G. Its continuations get G' = phi' + Gumbel noise, conditioned on their maximum Z being
the parent's G:

    G~ = -log( exp(-G) - exp(-Z) + exp(-G') ),  stably  G - max(v, 0) - log1p(exp(-|v|))
    with v = G - G' + log1mexp(G' - Z);

the `beam` largest of a level live on. Siblings stand in the order of G~, a draw order without
replacement: given the earlier siblings, the value of the next does not depend on which token it is,
so a cut by value is no selection by token and recursive rejection stays exact. (A later cut by q
would not be.) Where nothing is sampled this is plain beam search over the best tokens.
Letters: B rows, C candidates, K draft vocabulary, M new nodes (beam), N nodes, Q picked rows (next
beam).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.tree import DraftTree, empty_tree
from specctl.runtime.policies.base import DrawnTree, GrowRequest, PolicyEntry
from specctl.runtime.policies.draw import draft_distribution, log_guess, q_rows
from specctl.runtime.verify.walk import log_distribution


@dataclass(frozen=True, slots=True)
class StochasticBeam(DrawnTree):
    """`beam` nodes on each of `length` levels."""

    length: int = 4
    beam: int = 4

    @property
    def nodes(self) -> int:
        return self.length * self.beam

    def grow(self, growth: GrowRequest) -> DraftTree:
        depth = min(growth.budget.depth, self.length, growth.budget.nodes // self.beam)
        device, B = growth.view.slot_B.device, len(growth.view.slots)
        if depth <= 0:
            return empty_tree(B, device)
        logits_BMK, beams = growth.root()[:, None], [_Beam.root(B, device)]
        distributions: list[Tensor | None] = []
        for level in range(depth):
            beam, distribution_BMK = _next(growth, beams[-1], logits_BMK, self.beam, level)
            beams.append(beam)
            distributions.append(distribution_BMK)
            if level + 1 < depth:
                logits_BMK = growth.expand(growth.target_ids(beam.row_BQ), beam.parent_BQ)
        return self._tree(growth, beams[1:], distributions)

    def _tree(
        self, growth: GrowRequest, beams: list[_Beam], distributions: list[Tensor | None]
    ) -> DraftTree:
        row_BN = torch.cat([beam.row_BQ for beam in beams], 1)
        return DraftTree(
            growth.target_ids(row_BN),
            torch.cat([beam.parent_BQ for beam in beams], 1),
            torch.cat([beam.rank_BQ for beam in beams], 1),
            torch.cat([beam.score_BQ > -torch.inf for beam in beams], 1),
            self.kind(growth.sampled),
            len(beams),
            q=q_rows(growth, distributions, None, row_BN.shape[1]),
            estimate_BN=torch.cat([beam.phi_BQ.exp() for beam in beams], 1),
        )


@dataclass(frozen=True, slots=True)
class _Beam:
    """One level: draft rows, parents (node indices), ranks among siblings, log-probabilities phi
    and noisy scores (-inf: no such sequence); `first` is the index of its first node."""

    row_BQ: Tensor
    parent_BQ: Tensor
    rank_BQ: Tensor
    phi_BQ: Tensor
    score_BQ: Tensor
    first: int

    @classmethod
    def root(cls, num_rows: int, device: torch.device) -> _Beam:
        """The empty sequence, of log-probability 0; its noisy score may be anything, say 0."""
        none_B1 = torch.full((num_rows, 1), -1, dtype=torch.long, device=device)
        zero_B1 = torch.zeros(num_rows, 1, device=device)
        return cls(none_B1, none_B1, none_B1, zero_B1, zero_B1, -1)


def _next(
    growth: GrowRequest, beam: _Beam, logits_BMK: Tensor, width: int, level: int
) -> tuple[_Beam, Tensor | None]:
    _, M, K = logits_BMK.shape
    count = min(width, K)
    distribution_BMK = draft_distribution(growth, logits_BMK) if growth.sampled else None
    logq_BMK = (
        log_guess(logits_BMK) if distribution_BMK is None else log_distribution(distribution_BMK)
    )
    phi_BMK = beam.phi_BQ[:, :, None] + logq_BMK
    if distribution_BMK is None:
        best = phi_BMK.topk(count, dim=-1)
        score_BMC, row_BMC = best.values, best.indices
    else:
        best = (phi_BMK + growth.noise.draft_BMK(level, M, K)).topk(count, dim=-1)
        score_BMC, row_BMC = conditioned(best.values, beam.score_BQ), best.indices
    score_BMC = score_BMC.masked_fill(beam.score_BQ[:, :, None] == -torch.inf, -torch.inf)
    kept_BQ = score_BMC.flatten(1).topk(min(width, M * count), dim=1).indices.sort(1).values
    phi_BMC = phi_BMK.gather(2, row_BMC)
    found = _Beam(
        row_BMC.flatten(1).gather(1, kept_BQ),
        kept_BQ // count + beam.first,
        kept_BQ % count,
        phi_BMC.flatten(1).gather(1, kept_BQ),
        score_BMC.flatten(1).gather(1, kept_BQ),
        beam.first + M,
    )
    return found, distribution_BMK


def conditioned(noisy_BMC: Tensor, parent_BM: Tensor) -> Tensor:
    """Decreasing noisy scores of children, conditioned on the largest being the parent's."""
    top_BM1, parent_BM1 = noisy_BMC[:, :, :1], parent_BM[:, :, None]
    below_BMC = noisy_BMC - top_BM1  # <= 0, nan where a node has no child at all
    v_BMC = parent_BM1 - noisy_BMC + torch.log(-torch.expm1(below_BMC))
    score_BMC = parent_BM1 - v_BMC.clamp(min=0.0) - torch.log1p(torch.exp(-v_BMC.abs()))
    return torch.where(noisy_BMC > -torch.inf, score_BMC, -torch.inf)


POLICY = PolicyEntry(
    "rsd", "a sampled beam (RSD-S)", "https://arxiv.org/abs/2402.14160", StochasticBeam
)
