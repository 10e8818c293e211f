"""StaticTree: the same shape every round; level d gives each node branch[d] children.

Greedy and target-only rows take the top-k (POINT). Sampled rows take Gumbel top-k, which draws
without replacement in score order, and hand q on (RSD-C, constant branching; Jeon et al. 2024,
arXiv 2402.14160). Letters: B rows, M frontier nodes, C children per node, K draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafters.parts.base import StepState
from specctl.drafters.parts.tree import DraftTree, NodeKind, QRows, empty_tree
from specctl.recipes.errors import RecipeError
from specctl.runtime.policies.base import Growth
from specctl.runtime.verify.walk import log_law


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Branching factors by level, the root's first: (3, 2, 1) has 3 + 6 + 6 nodes."""

    branch: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "branch", tuple(int(b) for b in self.branch))
        if not self.branch or min(self.branch) < 1:
            raise RecipeError(
                "a static tree needs positive branching factors",
                where="serve.branch",
                found=str(self.branch),
                expected="for example [3, 2, 1, 1]",
                do="--set serve.branch=[3,2,1,1]",
            )

    @property
    def nodes(self) -> int:
        return sum(self._level_sizes(len(self.branch)))

    @property
    def depth(self) -> int:
        return len(self.branch)

    @property
    def is_chain(self) -> bool:
        return max(self.branch) == 1

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.WITHOUT_REPLACEMENT if sampled else NodeKind.POINT

    def _level_sizes(self, depth: int) -> list[int]:
        sizes, width = [], 1
        for branch in self.branch[:depth]:
            width *= branch
            sizes.append(width)
        return sizes

    def _fitting_depth(self, growth: Growth) -> int:
        """Whole levels that fit the budget."""
        depth, total = 0, 0
        for size in self._level_sizes(min(growth.budget.depth, self.depth)):
            total += size
            if total > growth.budget.nodes:
                break
            depth += 1
        return depth

    def grow(self, growth: Growth) -> DraftTree:
        depth = self._fitting_depth(growth)
        device, B = growth.view.slot_B.device, len(growth.view.slots)
        if depth == 0:
            return empty_tree(B, device)
        assert isinstance(growth.state, StepState)
        logits_BMK = growth.state.root(growth.view)[:, None]
        at_M = torch.full((1,), -1, dtype=torch.long, device=device)
        tokens, parents, ranks, laws, valids, count = [], [], [], [], [], 0
        for level, branch in enumerate(self.branch[:depth]):
            row_BMC, drawn_BMC, law_BMK = _children(growth, logits_BMK, branch, level)
            M, C = row_BMC.shape[1], row_BMC.shape[2]
            tokens.append(growth.target_ids(row_BMC).reshape(B, M * C))
            valids.append(drawn_BMC.reshape(B, M * C))
            parents.append(at_M.repeat_interleave(C).expand(B, M * C))
            ranks.append(torch.arange(C, device=device).repeat(M).expand(B, M * C))
            laws.append(law_BMK)
            at_M = torch.arange(count, count + M * C, device=device)
            count += M * C
            if level + 1 < depth:
                logits_BMK = growth.state.expand(tokens[-1], parents[-1])
        parent_BN, valid_BN = torch.cat(parents, 1), torch.cat(valids, 1)
        return DraftTree(
            torch.cat(tokens, 1),
            parent_BN,
            torch.cat(ranks, 1),
            valid_BN,
            self.kind(growth.sampled),
            depth,
            is_chain=all(b == 1 for b in self.branch[:depth]),
            q=_laws(growth, laws, count),
        )


def _children(
    growth: Growth, logits_BMK: Tensor, branch: int, level: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draft rows [B, M, C] in draw order, which of them were really drawn, and the law."""
    if not growth.sampled:
        row_BMC = logits_BMK.topk(branch, dim=-1).indices
        return row_BMC, torch.ones_like(row_BMC, dtype=torch.bool), None
    ids_K = None if growth.vocab is None else growth.vocab.ids_K
    law_BMK = growth.sampling.draft_law(logits_BMK, ids_K)
    noise_BMK = growth.noise.draft_BMK(level, *logits_BMK.shape[1:])
    drawn = (log_law(law_BMK) + noise_BMK).topk(branch, dim=-1)
    return drawn.indices, drawn.values > -torch.inf, law_BMK


def _laws(growth: Growth, laws: list[Tensor | None], count: int) -> QRows | None:
    """Laws by fed index: level order makes the inner nodes a prefix; leaves get zero rows."""
    if not growth.sampled:
        return None
    inner_BRK = torch.cat([law for law in laws if law is not None], dim=1)
    B, R, K = inner_BRK.shape
    leaf_BLK = inner_BRK.new_zeros(B, count + 1 - R, K)
    ids_K = None if growth.vocab is None else growth.vocab.ids_K
    return QRows(torch.cat([inner_BRK, leaf_BLK], dim=1), ids_K)
