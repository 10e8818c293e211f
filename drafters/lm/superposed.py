"""Superposed decoding (arXiv 2405.18400): several drafts for one forward of the draft model a step.

The `paths` running drafts are read as one token whose embedding is their mixture,

    e = sum over drafts i of w_i E[last token of draft i],    w = softmax(scores of the drafts)

so that one cache and one forward serve them all. What the draft model then predicts belongs to all
of them at once; n-grams tell which token goes with which draft. Of its `candidates` best tokens v
each is put behind each draft i, and the `paths` pairs with the largest

    score_i + (1 - alpha) log p_LM(v) + alpha log p_ngram(v | draft i)

go on; where no n-gram of draft i knows v, the pair has score_i + log p_LM(v) - penalty instead. The
n-grams are the distributions that the target itself has shown in this text, of contexts of one
token up to one per weight. The mixture is an approximation, so nothing in the cache outlives the
round; all pairs that were kept form a tree, and what the target accepts of it is exact.
Letters: B rows, C candidates, D hidden width, K draft vocabulary, M new nodes, N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.drafter import Budget, Family, Needs, Outcome, RoundView, Space
from specctl.core.errors import IncompatibleError
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.option_checks import check_options
from specctl.drafters.retrieval.store import Ids, NgramStores, StoreLimits
from specctl.drafters.retrieval.store_registry import Scope, StoredState
from specctl.drafters.states.lm_state import LmState
from specctl.drafters.states.ngram_distributions import (
    learn_round,
    learn_text,
    learning_scope,
    tail,
)
from specctl.drafters.states.tree_layout import aim_cache
from specctl.models.llama.fast_llama import FastLlama

PENALTY = 200.0  # of the formula above
TOPK = 4  # tokens kept of each of the target's distributions


@dataclass(frozen=True, slots=True)
class SuperposedOptions(SmallLmOptions):
    """Those of small-lm and the symbols of the formula above: `paths`, `candidates`, `alpha`
    and `weights` of n-gram contexts of 1, 2, ... tokens. `scope`: whose distributions may help
    whom."""

    paths: int = 3
    candidates: int = 9
    alpha: float = 0.54
    weights: tuple[float, ...] = (0.01, 0.04, 0.15, 0.18, 0.12)
    scope: str = Scope.REQUEST
    max_mib: int = 32

    def __post_init__(self) -> None:
        SmallLmOptions.__post_init__(self)
        sizes = min(self.paths, self.candidates, len(self.weights)) >= 1
        is_right = sizes and 0.0 <= self.alpha <= 1.0
        is_right = is_right and min(self.weights, default=0) > 0
        names = ("paths", "candidates", "alpha", "weights")
        expected = "counts of 1 or more, alpha 0 to 1, positive weights"
        check_options(self, is_right, names, expected)


class Superposed(SmallLm):
    """A small-lm that drafts several continuations at once."""

    family = "superposed"
    splits_rows = False

    @property
    def head_width(self) -> int | None:
        return None

    def needs(self) -> Needs:
        topk = min(TOPK, self.spec.vocab_size)
        return replace(SmallLm.needs(self), topk=topk, topk_logp=True)

    def open(self, space: Space) -> SuperposedState:
        if not isinstance(self.lm, FastLlama):
            raise IncompatibleError(
                "this draft model cannot read a mixture of tokens",
                found=type(self.lm).__name__,
                expected="a draft model trained here, or a Llama, Mistral or Qwen folder",
                do="draft with family small-lm",
            )
        return SuperposedState(self, space)


@dataclass(frozen=True, slots=True)
class BeamLevel:
    """The drafts after one step: their last tokens, which draft of the step before each goes on
    from, and their scores, all [B, M]."""

    token_BM: Tensor
    from_BM: Tensor
    score_BM: Tensor


class SuperposedState(StoredState, LmState):
    """The draft model's true keys and values, and the target's distributions. `num_forwards` counts
    what drafting took."""

    lm: FastLlama
    is_recordable = False

    def __init__(self, drafter: Superposed, space: Space) -> None:
        super().__init__(drafter, space)
        self.options: SuperposedOptions = drafter.options
        self.vocab, self.num_forwards = drafter.vocab, 0
        self.lengths = range(len(self.options.weights), 0, -1)
        limits = StoreLimits(self.options.max_mib << 20, TOPK)
        registry = NgramStores(learning_scope(self.options.scope), limits)
        self.stores = registry.rows(space.identity, space.num_slots)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        learn_text(self.stores.start(slot), tokens, self.lengths, keep=None)

    def observe(self, outcome: Outcome) -> None:
        if (
            self._growth is None
        ):  # other policies grow the draft model alone: nobody asks for distributions
            learn_round(self.stores, outcome, self.lengths, keep=None)
        super().observe(outcome)

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        paths = min(self.options.paths, budget.nodes, self._vocab_size())
        depth = min(budget.depth, budget.nodes // max(paths, 1))
        if depth <= 0:
            return empty_tree(len(view.slots), view.slot_B.device)
        levels = [self._first(view.shown(self.root(view)), paths)]
        texts = [[tail(tokens, self.lengths.start)] * paths for tokens in view.tokens]
        while len(levels) < depth:
            newest = levels[-1]
            texts = _followed(texts, newest, self.lengths.start)
            logits_BK = view.shown(self._mixture(view, newest, len(levels)))
            levels.append(self._pairs(view, logits_BK, newest, texts))
        self.num_forwards += depth
        self._settle(view)
        return _tree(levels)

    def _vocab_size(self) -> int:
        return self.lm.spec.vocab_size if self.vocab is None else self.vocab.size

    def _settle(self, view: RoundView) -> None:
        """What was read up to the root stays, mixtures do not."""
        for slot, kept in zip(view.slots, self._kept, strict=True):
            self.num_cached[slot] = kept
        self._growth = None

    def _target_ids(self, row: Tensor) -> Tensor:
        return row if self.vocab is None else self.vocab.ids_K[row]

    def _first(self, logits_BK: Tensor, paths: int) -> BeamLevel:
        best = logits_BK.float().log_softmax(-1).topk(paths, dim=-1)
        from_BM = torch.zeros_like(best.indices)
        return BeamLevel(self._target_ids(best.indices), from_BM, best.values)

    def _mixture(self, view: RoundView, level: BeamLevel, step: int) -> Tensor:
        """[B, K]: logits after the drafts' last tokens, read as one."""
        growth, module = self._growth, self.lm.module
        assert growth is not None, "root() begins a round"
        token_BM = self.drafter.readable(level.token_BM)
        embedding_BMD = module.model.embed_tokens(token_BM)
        weight_BM1 = level.score_BM.softmax(-1)[:, :, None].to(embedding_BMD.dtype)
        mixed_B1D = (weight_BM1 * embedding_BMD).sum(1, keepdim=True)
        start_B, span = growth.kept_B + step - 1, growth.longest + step
        uniform = None if growth.uniform is None else growth.uniform + step - 1
        aim_cache(self.kv, view, start_B, 1, span, uniform)
        masks, window = self.lm.chain_masks(start_B, 1, span), module.shape.window
        mask = masks.full if window is None else masks.windows[window]
        position_B1, layers = self._within(start_B[:, None]), range(self.lm.spec.num_layers)
        state_B1D = self.lm.through(mixed_B1D, position_B1, mask, self.kv, layers)
        return self.drafter.draft_logits(self.lm.lm_head(state_B1D))[:, 0]

    def _pairs(
        self, view: RoundView, logits_BK: Tensor, level: BeamLevel, texts: list[list[Ids]]
    ) -> BeamLevel:
        """The best pairs of a draft and a token."""
        logp_BK = logits_BK.float().log_softmax(-1)
        best = logp_BK.topk(min(self.options.candidates, logp_BK.shape[-1]), dim=-1)
        token_BC = self._target_ids(best.indices)
        gram_BMC = self._ngrams(view, token_BC, texts)
        logp_B1C, alpha = best.values[:, None], self.options.alpha
        known_BMC = (1.0 - alpha) * logp_B1C + alpha * gram_BMC.clamp(min=1e-30).log()
        gain_BMC = torch.where(gram_BMC > 0, known_BMC, logp_B1C - PENALTY)
        pairs = (level.score_BM[:, :, None] + gain_BMC).flatten(1)
        kept, C = pairs.topk(level.token_BM.shape[1], dim=-1), token_BC.shape[1]
        return BeamLevel(token_BC.gather(1, kept.indices % C), kept.indices // C, kept.values)

    def _ngrams(self, view: RoundView, token_BC: Tensor, texts: list[list[Ids]]) -> Tensor:
        """[B, M, C]: the weighted sum of the target's distributions after each draft; 0: none knows
        it. With alpha 0 nobody is asked."""
        if self.options.alpha == 0.0:
            return torch.ones(*token_BC.shape[:1], len(texts[0]), token_BC.shape[1])
        distributions = [
            [self._distribution(slot, text) for text in row]
            for slot, row in zip(view.slots, texts, strict=True)
        ]
        found = [
            [[distribution.get(token, 0.0) for token in tokens] for distribution in row]
            for tokens, row in zip(token_BC.tolist(), distributions, strict=True)
        ]
        return torch.tensor(found, device=token_BC.device)

    def _distribution(self, slot: int, text: Ids) -> dict[int, float]:
        distribution: dict[int, float] = {}
        for length, weight in enumerate(self.options.weights, start=1):
            found = self.stores.at(slot).get(text[-length:]) if length <= len(text) else ()
            total = math.fsum(entry.weight for entry in found)
            for entry in found:
                share = weight * entry.weight / max(total, 1e-30)
                distribution[entry.ids[0]] = distribution.get(entry.ids[0], 0.0) + share
        return distribution


def _followed(texts: list[list[Ids]], level: BeamLevel, length: int) -> list[list[Ids]]:
    """The ends of the drafts' texts, one token later."""
    tokens, origins = level.token_BM.tolist(), level.from_BM.tolist()
    return [
        [(*row[origin], token)[-length:] for token, origin in zip(*new, strict=True)]
        for row, new in zip(texts, zip(tokens, origins, strict=True), strict=True)
    ]


def _tree(levels: list[BeamLevel]) -> DraftTree:
    """Every draft of every step, level by level."""
    B, M = levels[0].token_BM.shape
    parents = [
        level.from_BM + (depth - 1) * M if depth else torch.full_like(level.from_BM, -1)
        for depth, level in enumerate(levels)
    ]
    token_BN = torch.cat([level.token_BM for level in levels], 1)
    rank_BN = torch.arange(M, device=token_BN.device).repeat(len(levels)).expand(B, -1)
    return DraftTree(
        token_BN,
        torch.cat(parents, 1),
        rank_BN,
        torch.ones_like(token_BN, dtype=torch.bool),
        NodeKind.POINT,
        len(levels),
        is_chain=M == 1,
    )


FAMILY = Family(
    name="superposed",
    summary=(
        "A small language model that reads several drafts as one mixture of tokens, so that a "
        "tree of drafts costs the forwards of a single one; n-grams of what the target has "
        "written decide which token belongs to which draft. Trained like small-lm. For draft "
        "models whose forwards are not cheap and texts that repeat their own phrases."
    ),
    paper="https://arxiv.org/abs/2405.18400",
    options=SuperposedOptions,
    build=Superposed,
    trainable=True,
    policies=("direct", "chain"),
)
