"""Heads that do not see each other's choices: all of them predict at once, and a tree of their
ranks is proposed in one go.

They can also be grown step by step by a tree policy: then the logits after a node at depth d are
those of head d, whatever the node's token, unless a rescorer puts them in the light of the tokens
before (`rescore`).
Letters: B rows, D hidden width, K draft vocabulary, M new nodes, N nodes, O output width, P path
(one per head), X any axes, Y carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Budget, DraftState, RoundView, Space
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, empty_tree
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.head_drafter import HeadDrafter
from specctl.drafters.nets.rescore import Rescoring, extended, last_tokens
from specctl.drafters.nets.routed import read_head
from specctl.drafters.states.head_state import HeadState
from specctl.drafters.states.template import Path, Template, compile_template, greedy_paths

MAX_RANK = 10
DEFAULT_NODES = 24
RANK_SHARE = (0.55, 0.14, 0.07, 0.045, 0.03, 0.02)  # of the first head; later heads fade
HEAD_FADE = 0.75


def default_tree(num_heads: int) -> tuple[Path, ...]:
    """Paths by a typical profile: each head is HEAD_FADE as accurate as the one before."""
    chances = [[share * HEAD_FADE**i for share in RANK_SHARE] for i in range(num_heads)]
    return greedy_paths(chances, DEFAULT_NODES)


def first_ranks(num_heads: int) -> tuple[Path, ...]:
    """The block: every head's best token, one path."""
    return tuple((0,) * (i + 1) for i in range(num_heads))


class ParallelHeads(HeadDrafter):
    """A drafter of such heads. `tree` holds the rank paths that it proposes by itself."""

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.tree: tuple[Path, ...] = ()

    @property
    def rescoring(self) -> Rescoring | None:
        """How drafts are rescored, if they are."""
        return None

    def open(self, space: Space) -> DraftState:
        return ParallelState(self, space)

    def head_logits(self, index: int, state_XD: Tensor) -> Tensor:
        """[X, K]: what head `index` predicts for token t + 2 + index."""
        weights = self.head_weights()
        ready_XO = self.ready(index, self.begin(state_XD))
        return F.linear(ready_XO, weights[min(index, len(weights) - 1)])


@dataclass(frozen=True, slots=True)
class Best:
    """Draft rows [B, N] of a template's nodes, and scores: -inf where there is no such rank."""

    values: Tensor
    indices: Tensor


def _ranked(logits_BMK: Tensor, from_N: Tensor, rank_N: Tensor) -> Best:
    """Of each node's logits (row `from_N`) the token of its rank."""
    ranks = min(MAX_RANK, logits_BMK.shape[-1])
    best, at_N = logits_BMK.topk(ranks, dim=-1), rank_N.clamp(max=ranks - 1)
    values_BN = best.values[:, from_N, at_N].masked_fill(rank_N >= ranks, -torch.inf)
    return Best(values_BN, best.indices[:, from_N, at_N])


class ParallelState(HeadState):
    """Logits of all heads of one round, and where its nodes stand."""

    def __init__(self, drafter: ParallelHeads, space: Space) -> None:
        super().__init__(drafter, drafter.features(space))
        self.heads, self.device = drafter, space.device
        self._templates: dict[tuple[int, int], Template] = {}
        self._logits_BPK: Tensor | None = None
        self._depths: list[Tensor] = []
        self._contexts: list[Tensor] = []

    # -- one static tree ------------------------------------------------------------------------

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        num_rows, is_known = len(view.slots), self.features.is_known
        if not any(is_known[slot] for slot in view.slots):
            return empty_tree(num_rows, self.device)
        template = self._template(budget)
        if not template.levels:
            return empty_tree(num_rows, self.device)
        best = self._best(view, template)
        token_BN, valid_BN = best.indices, best.values > -torch.inf
        if self.heads.vocab is not None:
            token_BN = self.heads.vocab.ids_K[token_BN]
        if not all(is_known[slot] for slot in view.slots):
            known = [is_known[slot] for slot in view.slots]
            valid_BN = valid_BN & torch.tensor(known, device=self.device)[:, None]
        return template.point_tree(token_BN, valid_BN)

    def _best(self, view: RoundView, template: Template) -> Best:
        """Draft rows of the template's nodes. Heads alone are asked at once; where drafts are
        rescored, level after level."""
        if self.heads.rescoring is None:
            logits_BPK = view.shown(self._logits(view, len(template.levels)))
            return _ranked(logits_BPK, template.depth_N, template.rank_N)
        logits_BMK, start, levels = self.root(view)[:, None], -1, list[Best]()
        for first, last in template.levels:
            parent_M = template.parent_N[first:last]
            from_M, rank_M = parent_M - start, template.rank_N[first:last]
            levels.append(_ranked(view.shown(logits_BMK), from_M, rank_M))
            token_BM, start = levels[-1].indices, first
            if self.heads.vocab is not None:
                token_BM = self.heads.vocab.ids_K[token_BM]
            logits_BMK = self.expand(token_BM, parent_M.expand_as(token_BM))
        values, indices = zip(*((best.values, best.indices) for best in levels), strict=True)
        return Best(torch.cat(values, 1), torch.cat(indices, 1))

    def _template(self, budget: Budget) -> Template:
        key = budget.nodes, budget.depth
        if key not in self._templates:
            self._templates[key] = compile_template(self.heads.tree, *key, self.device)
        return self._templates[key]

    def _logits(self, view: RoundView, num_heads: int) -> Tensor:
        """[B, num_heads, K]."""
        carry_BY = self.heads.begin(self.features.at(view))
        states = [self.heads.ready(i, carry_BY) for i in range(num_heads)]
        if len(self._packed) == 1:  # shared (or a single head): one product
            return read_head(torch.stack(states, dim=1), self._packed[0])
        pairs = zip(states, self._packed[:num_heads], strict=True)
        return torch.stack([read_head(state, head) for state, head in pairs], dim=1)

    # -- grown by a policy ----------------------------------------------------------------------

    def marginals(self, view: RoundView, length: int) -> Tensor | None:
        if self.heads.rescoring is not None:
            return None
        return self._logits(view, min(length, self.heads.options.num_heads))

    def root(self, view: RoundView) -> Tensor:
        self._logits_BPK = self._logits(view, self.heads.options.num_heads)
        self._depths = [torch.zeros_like(view.slot_B[:, None])]
        rescoring = self.heads.rescoring
        if rescoring is None:
            return self._logits_BPK[:, 0]
        self._contexts = [last_tokens(view, rescoring.rescorer.reach)[:, None]]
        return rescoring(self._logits_BPK[:, :1], self._contexts[0])[:, 0]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """Logits after a node at depth d come from head d; past the last head, from the last."""
        assert self._logits_BPK is not None, "root() begins a round"
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        self._depths.append(depth_BM)
        head_BM1 = depth_BM.clamp(max=self._logits_BPK.shape[1] - 1)[:, :, None]
        logits_BMK = self._logits_BPK.gather(1, head_BM1.expand(-1, -1, self._logits_BPK.shape[-1]))
        rescoring = self.heads.rescoring
        if rescoring is None:
            return logits_BMK
        self._contexts.append(extended(torch.cat(self._contexts, dim=1), token_BM, parent_BM))
        return rescoring(logits_BMK, self._contexts[-1])
