"""Caterpillar: a greedy chain with more siblings where the drafter is unsure (GliDe with CaPE,
arXiv 2402.02082).

Most rejections happen where the drafter is unsure, and one rejected position ends the round. Each
position proposes its best tokens, `widths[i]` of them when the largest probability lies in the i-th
of equal bins of [0, 1]; only the best is extended. Nothing is drafted for it: the siblings come
from the same row.
Letters: B rows, C candidates, K draft vocabulary, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import RecipeError
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.runtime.policies.base import GrowRequest, PointTree, PolicyEntry
from specctl.runtime.policies.draw import log_guess

PAPER_WIDTHS = (8, 8, 8, 6, 6, 6, 4, 4, 2, 2)


@dataclass(frozen=True, slots=True)
class Caterpillar(PointTree):
    """`length` positions; `widths` from the least to the most confident bin."""

    length: int = 5
    widths: tuple[int, ...] = PAPER_WIDTHS

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(int(width) for width in self.widths))
        if not self.widths or min(self.widths) < 1:
            raise RecipeError(
                "every bin of confidence proposes at least one token",
                where="serve.widths",
                found=str(list(self.widths)),
                expected="positive widths, for example [8, 6, 4, 2]",
                do="leave serve.widths out for the paper's",
            )

    @property
    def nodes(self) -> int:
        return self.length * max(self.widths)

    @property
    def is_chain(self) -> bool:
        return max(self.widths) == 1

    def grow(self, growth: GrowRequest) -> DraftTree:
        depth = min(growth.budget.depth, self.length, growth.budget.nodes // max(self.widths))
        B, device = len(growth.view.slots), growth.view.slot_B.device
        if depth <= 0:
            return empty_tree(B, device)
        logp_BK = log_guess(growth.root()[:, None])[:, 0]
        tokens, valids, counts = [], [], []
        alive_B1 = torch.ones(B, 1, dtype=torch.bool, device=device)
        for step in range(depth):
            best, width_B = self._position(logp_BK)
            C = best.indices.shape[1]
            tokens.append(growth.target_ids(best.indices))
            fits_BC = torch.arange(C, device=device) < width_B[:, None]
            valids.append(fits_BC & alive_B1 & (best.values > -torch.inf))
            counts.append(C)
            alive_B1 = valids[-1][:, :1]
            if step + 1 < depth:
                parent_B1 = torch.full((B, 1), step - 1, dtype=torch.long, device=device)
                logp_BK = log_guess(growth.expand(tokens[-1][:, :1], parent_B1))[:, 0]
        return _tree(torch.cat(tokens, 1), torch.cat(valids, 1), counts)

    def _position(self, logp_BK: Tensor) -> tuple[torch.return_types.topk, Tensor]:
        """The best tokens of a position, as many as the least sure row wants, and what each row
        wants."""
        table = torch.tensor(self.widths, device=logp_BK.device)
        bin_B = (logp_BK.amax(-1).exp() * len(table)).long().clamp(max=len(table) - 1)
        width_B = table[bin_B]
        return logp_BK.topk(min(int(width_B.max()), logp_BK.shape[-1]), dim=-1), width_B


def _tree(token_BN: Tensor, valid_BN: Tensor, counts: list[int]) -> DraftTree:
    """Positions one after another, the extended token in front of its siblings."""
    parents: list[int] = []
    ranks: list[int] = []
    expanded: list[int] = []
    spine = -1
    for step, width in enumerate(counts):
        first = len(parents)
        parents += [spine] * width
        ranks += range(width)
        expanded += [step] + [-1] * (width - 1)
        spine = first
    table = torch.tensor([parents, ranks, expanded], device=token_BN.device)
    parent_BN, rank_BN, expanded_BN = (row.expand_as(token_BN) for row in table)
    return DraftTree(
        token_BN,
        parent_BN,
        rank_BN,
        valid_BN,
        NodeKind.POINT,
        len(counts),
        is_chain=max(counts) == 1,
        expanded_BN=expanded_BN,
    )


POLICY = PolicyEntry(
    "cape", "a chain, wider where it is unsure", "https://arxiv.org/abs/2402.02082", Caterpillar
)
