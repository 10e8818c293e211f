"""Chain: one token after another, with an optional confidence stop.

Greedy rows take the argmax (POINT); sampled rows draw from q and hand q on (IID); under the rule
target-only rows draw with the target's own noise (POINT, Daliri-Musco-Suresh coupling). The stop
keeps the token it looks at and decides from the largest probability of the row, never from the
drawn token, so it is lossless for sampled drafts too.

Letters: B rows, K draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafters.parts.base import StepState
from specctl.drafters.parts.tree import DraftTree, NodeKind, QRows, chain_tree, empty_tree
from specctl.runtime.policies.base import Growth
from specctl.runtime.verify.walk import best_token, log_law


@dataclass(frozen=True, slots=True)
class Chain:
    """`length` tokens; drafting ends after a token whose row had max q < `confidence`."""

    length: int = 5
    confidence: float | None = None

    @property
    def nodes(self) -> int:
        return self.length

    @property
    def depth(self) -> int:
        return self.length

    @property
    def is_chain(self) -> bool:
        return True

    def kind(self, sampled: bool) -> NodeKind:
        return NodeKind.IID if sampled else NodeKind.POINT

    def grow(self, growth: Growth) -> DraftTree:
        depth = min(growth.budget.depth, growth.budget.nodes)
        if depth <= 0:
            return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        assert isinstance(growth.state, StepState)
        logits_BK = growth.state.root(growth.view)
        tokens, laws, valids = [], [], []
        alive_B = torch.ones_like(growth.view.slot_B, dtype=torch.bool)
        for step in range(depth):
            row_B, law_BK = self._pick(growth, logits_BK, step)
            tokens.append(growth.target_ids(row_B))
            laws.append(law_BK)
            valids.append(alive_B)
            if step + 1 == depth:
                break
            if self.confidence is not None:
                alive_B = alive_B & _confident(logits_BK, law_BK, self.confidence)
                if not bool(alive_B.any()):
                    break
            parent_B1 = torch.full_like(row_B[:, None], step - 1)
            logits_BK = growth.state.expand(tokens[-1][:, None], parent_B1)[:, 0]
        return self._tree(growth, tokens, laws, valids)

    def _pick(self, growth: Growth, logits_BK: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """Draft-vocabulary row of the next token, and the law it was drawn from (sampled only)."""
        if growth.sampling.all_greedy:
            return best_token(logits_BK), None
        ids_K = None if growth.vocab is None else growth.vocab.ids_K
        law_BK = growth.sampling.draft_law(logits_BK[:, None], ids_K)[:, 0]
        if growth.coupled:
            noise_BK = growth.noise.coupled_BK(
                step, logits_BK.shape[-1] if ids_K is None else ids_K
            )
            return best_token(log_law(law_BK) + noise_BK), None
        noise_BK = growth.noise.draft_BMK(step, 1, logits_BK.shape[-1])[:, 0]
        return best_token(log_law(law_BK) + noise_BK), law_BK

    def _tree(
        self,
        growth: Growth,
        tokens: list[Tensor],
        laws: list[Tensor | None],
        valids: list[Tensor],
    ) -> DraftTree:
        q = None
        if growth.sampled:
            rows = [law for law in laws if law is not None]
            ids_K = None if growth.vocab is None else growth.vocab.ids_K
            q = QRows(torch.stack([*rows, torch.zeros_like(rows[0])], dim=1), ids_K)
        kind = self.kind(growth.sampled)
        return chain_tree(torch.stack(tokens, 1), torch.stack(valids, 1), kind, q)


def _confident(logits_BK: Tensor, law_BK: Tensor | None, threshold: float) -> Tensor:
    law_BK = logits_BK.float().softmax(-1) if law_BK is None else law_BK
    return law_BK.amax(-1) >= threshold
