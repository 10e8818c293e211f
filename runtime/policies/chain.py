"""Chain: one token after another, until the length is reached or a stop rule ends it.

Greedy rows take the argmax (POINT); sampled rows draw from q and hand q on (IID); under the rule
target-only rows draw with the target's own noise (POINT, Daliri-Musco-Suresh coupling). A stop rule
(`stops/`) is asked behind each token, which is then kept: it never sees the token that it prevents,
so it is lossless for sampled drafts too.
Letters: B rows, K draft vocabulary, M new nodes, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundSeconds
from specctl.core.errors import RecipeError
from specctl.core.language_model import WholeChain
from specctl.core.tree import (
    DraftTree,
    NodeKind,
    QRows,
    chain_parent,
    chain_tree,
    empty_tree,
)
from specctl.runtime.policies.base import GrowRequest, PolicyEntry
from specctl.runtime.policies.draw import log_guess
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.stops import DraftStep, StopRule, make_stop
from specctl.runtime.verify.walk import log_distribution


@dataclass(frozen=True, slots=True)
class Chain:
    """At most `length` tokens. `stop` names a stop rule, `threshold` replaces its own, `stop_file`
    holds the weights of a trained one; `confidence` is short for the rule of that name."""

    length: int = 5
    confidence: float | None = None
    stop: str | None = None
    threshold: float | None = None
    stop_file: str | None = None
    stopper: StopRule | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name, threshold = self.stop, self.threshold
        if self.confidence is not None:
            if name is not None:
                raise RecipeError(
                    "two stop rules for one chain",
                    where="serve.confidence",
                    found=f"confidence {self.confidence:g}, stop {name}",
                    expected="one of them",
                    do="leave confidence out",
                )
            name, threshold = "confidence", self.confidence
        if name is not None:
            object.__setattr__(self, "stopper", make_stop(name, threshold, self.stop_file))
        elif threshold is not None or self.stop_file is not None:
            raise RecipeError(
                "settings of a stop rule, but no rule",
                where="serve.stop",
                expected="the name of a stop rule",
                do="write stop: svip, or remove threshold and stop_file",
            )

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

    def grow(self, growth: GrowRequest) -> DraftTree:
        depth, stopper = min(growth.budget.depth, growth.budget.nodes), self.stopper
        if depth <= 0:
            return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        if stopper is not None:
            depth = stopper.length(depth)
        wanted_B = None if stopper is None else stopper.planned(growth.view, growth.steps)
        if wanted_B is not None:
            depth = min(depth, int(wanted_B.max()))
            if depth <= 0:  # no pass of the drafter either
                return empty_tree(len(growth.view.slots), growth.view.slot_B.device)
        looks = stopper is not None and stopper.looks
        if not looks and wanted_B is None and (whole := growth.whole_chain(depth)) is not None:
            return self._whole(growth, whole)
        logits_BK = growth.root()
        tokens, distributions, valids, chances = [], [], [], list[Tensor]()
        alive_B = torch.ones_like(growth.view.slot_B, dtype=torch.bool)
        for step in range(depth):
            if wanted_B is not None:
                alive_B = alive_B & (step < wanted_B)
            row_B, distribution_BK = self.pick(growth, logits_BK, step)
            if growth.may_draft_nothing:
                alive_B = alive_B & (logits_BK.amax(-1) > -torch.inf)
            if growth.estimates and not growth.sampled:
                logq_B = log_guess(logits_BK).gather(1, row_B[:, None])[:, 0]
                chances.append(logq_B if not chances else chances[-1] + logq_B)
            tokens.append(growth.target_ids(row_B))
            distributions.append(distribution_BK)
            valids.append(alive_B)
            if step + 1 == depth:
                break
            if stopper is not None:
                stop_B = stopper.stops(DraftStep(step, logits_BK, row_B, growth.steps))
                alive_B = alive_B if stop_B is None else alive_B & ~stop_B
            may_end = growth.may_draft_nothing and not alive_B.is_cuda
            if (stopper is not None or may_end) and not bool(alive_B.any()):
                break
            parent_B1 = chain_parent(step, len(row_B), row_B.device)
            logits_BK = growth.expand(tokens[-1][:, None], parent_B1)[:, 0]
        tree = self._tree(growth, tokens, distributions, valids)
        return tree if not chances else replace(tree, estimate_BN=torch.stack(chances, 1).exp())

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        if self.stopper is not None:
            self.stopper.observe(outcome, seconds)

    def pick(
        self, growth: GrowRequest, logits_BK: Tensor, step: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft-vocabulary row of the next token, and the distribution it was drawn from (sampled
        only)."""
        if growth.sampling.all_greedy:
            return best_token(logits_BK), None
        ids_K = None if growth.vocab is None else growth.vocab.ids_K
        distribution_BK = growth.sampling.draft_distribution(logits_BK[:, None], ids_K)[:, 0]
        score_BK = log_distribution(distribution_BK)
        if growth.coupled:
            ids = logits_BK.shape[-1] if ids_K is None else ids_K
            return growth.noise.coupled_draw_B(score_BK, step, ids), None
        row_B1 = growth.noise.draft_draw_BM(score_BK[:, None], step)
        return row_B1[:, 0], distribution_BK

    def _whole(self, growth: GrowRequest, found: WholeChain) -> DraftTree:
        """The tree of a chain that was drafted in one call."""
        kind = self.kind(growth.sampled)
        valid_BN = torch.ones_like(found.token_BN, dtype=torch.bool)
        if not growth.sampled:
            return chain_tree(found.token_BN, valid_BN, kind)
        ids_K = None if growth.vocab is None else growth.vocab.ids_K
        distribution_BNK = found.distribution_BNK
        if distribution_BNK is None:
            distribution_BNK = growth.sampling.draft_distribution(found.logits, ids_K)
        q = QRows(torch.nn.functional.pad(distribution_BNK, (0, 0, 0, 1)), ids_K)
        return chain_tree(found.token_BN, valid_BN, kind, q)

    def _tree(
        self,
        growth: GrowRequest,
        tokens: list[Tensor],
        distributions: list[Tensor | None],
        valids: list[Tensor],
    ) -> DraftTree:
        q = None
        if growth.sampled:
            rows = [distribution for distribution in distributions if distribution is not None]
            ids_K = None if growth.vocab is None else growth.vocab.ids_K
            q = QRows(torch.stack([*rows, torch.zeros_like(rows[0])], dim=1), ids_K)
        kind = self.kind(growth.sampled)
        return chain_tree(torch.stack(tokens, 1), torch.stack(valids, 1), kind, q)


POLICY = PolicyEntry(
    "chain", "one token after another", "https://arxiv.org/abs/2211.17192", Chain, is_tree=False
)
