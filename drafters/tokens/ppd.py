"""PPD, hardware-aware parallel prompt decoding (arXiv 2405.18628): one forward verifies and drafts.

Behind every drafted token that may turn out to be the last one accepted stand up to `num_heads`
prompt tokens, in the very forward that verifies the draft. Their embeddings are trained, and
nothing else. Each sees the text, the nodes it stands behind and the prompt tokens before it; prompt
token i behind position t says token t + 1 + i (Ak), and so the round that accepts that node leaves
guesses for the next `num_heads` tokens behind the new root. They are drafted as a tree of ranks.
How many prompt tokens stand where, and how deep the next tree can therefore be, is planned
(`states/prompt_tree.py`). Keys and values of prompt tokens are written over by the next round.

Ensemble prompt tokens: `copies` embeddings stand at each place; copy c sees copy c of those before
it, and the states of all copies are averaged in front of the LM head, which averages their logits.
Trained behind random places against what the target says there, place i weighing decay^i (section
3.2: 0.8).
Letters: A anchors, B rows, C candidates, D hidden width, K draft vocabulary, M new nodes (prompt
rows), N nodes, P path, V target vocabulary, W window (prompt tokens), X any axes (states of the
tree), Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Budget, DraftState, Family, Needs, Outcome, RoundView, Space
from specctl.core.errors import RecipeError
from specctl.core.language_model import Borrowed, Feed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, NodeKind, empty_tree
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.places import PlacesDrafter, PlacesOptions
from specctl.drafters.nets.routed import read_head, served_head
from specctl.drafters.option_checks import Count, Within
from specctl.drafters.states.borrowed_state import groups_behind
from specctl.drafters.states.probes import with_probes
from specctl.drafters.states.prompt_tree import (
    Chances,
    PromptTables,
    even_trees,
    plan_trees,
    typical_chances,
)

LOUD = 16.0  # embeddings are kept this much smaller, to learn as fast as other weights do


@dataclass(frozen=True, slots=True)
class PpdOptions(PlacesOptions):
    """`num_heads` prompt tokens of `copies` embeddings each. `chances[d][r]`: how often the guess
    of rank r, d + 1 tokens behind the root, is right; shapes the trees and sets how many ranks are
    drafted (None: typical ones; one rank a level makes chains). `behind_each`: so many prompt
    tokens stand behind the root and every drafted token alike (None: where the plan wants them)."""

    num_heads: Count = 3
    copies: Count = 1
    decay: Annotated[float, Within(0, 10)] = 0.8
    chances: tuple[tuple[float, ...], ...] | None = None
    behind_each: Count | None = None

    def __post_init__(self) -> None:
        PlacesOptions.__post_init__(self)
        levels = self.levels()
        if len(levels) == self.num_heads and all(
            level and min(level) > 0 and sum(level) <= 1 for level in levels
        ):
            return
        raise RecipeError(
            "chances give, for each prompt token, how often its ranks are right",
            where="drafter.options.chances",
            found=str([list(level) for level in levels]),
            expected=f"{self.num_heads} lists of positive numbers that sum to at most 1",
            do="leave chances out, or write for example [[0.3, 0.1], [0.2, 0.05], [0.1]]",
        )

    def levels(self) -> Chances:
        """The chances by level and rank."""
        if self.chances is not None:
            return tuple(tuple(level) for level in self.chances)
        return typical_chances(self.num_heads)


class PromptNet(nn.Module):
    """The embeddings, as they stand in front of the first layer."""

    def __init__(self, copies: int, count: int, width: int) -> None:
        super().__init__()
        self.copies = copies
        self.tokens = nn.Parameter(torch.randn(copies * count, width) * 0.02 / LOUD)

    def forward(self) -> Tensor:
        """[copies, W, D]"""
        return (self.tokens * LOUD).view(self.copies, -1, self.tokens.shape[1])


class Ppd(PlacesDrafter):
    """All layers of the target run, over text and prompt tokens alike."""

    family = "ppd"
    reach, replaces_anchor = 2, False
    first = 0
    module: PromptNet
    options: PpdOptions

    def __init__(self, options: PpdOptions, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self._is_fresh = True

    def make_net(self) -> PromptNet:
        return PromptNet(self.options.copies, self.options.num_heads, self.spec.hidden_size)

    def needs(self) -> Needs:
        """What the LM head reads, at the prompt tokens; the loss reads the text itself."""
        return Needs((self.spec.num_layers,), teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        """Fresh prompt tokens begin as embeddings of the target's vocabulary."""
        super().bind(borrowed)
        tokens, rows_VD = self.module.tokens, borrowed.embedding_VD
        if self._is_fresh and not rows_VD.is_meta and not tokens.is_meta:
            chance = torch.Generator().manual_seed(0)
            ids = torch.randint(self.spec.vocab_size, tokens.shape[:1], generator=chance)
            found = rows_VD[ids.to(rows_VD.device)] * borrowed.embed_scale
            with torch.no_grad():
                tokens.copy_(found.float() / LOUD)
        self._is_fresh = False

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self._is_fresh = False

    def trimmed(self, vocab: VocabMap) -> Self:
        small = super().trimmed(vocab)
        small._is_fresh = self._is_fresh
        return small

    def behind(self, state_BAD: Tensor) -> Tensor:
        """[B, A copies W, D]: the same embeddings behind every token."""
        B, A, D = state_BAD.shape
        tokens: Tensor = self.module().to(state_BAD.dtype)
        return tokens.expand(B, A, *tokens.shape).reshape(B, -1, D)

    def _read(self, batch: TrainBatch, anchor_BA: Tensor, lm: LanguageModel) -> Tensor:
        """[B, A, W, D]: each copy is a group of its own, which sees the text and itself."""
        (B, A), W, copies = anchor_BA.shape, self.options.num_heads, self.options.copies
        last = self.spec.num_layers
        each_BA = anchor_BA.repeat_interleave(copies, dim=1)
        groups = groups_behind(lm, self.attention, batch, each_BA, W, replaces_anchor=False)
        like = torch.empty(B, A, self.spec.hidden_size, dtype=lm.dtype, device=anchor_BA.device)
        feed = Feed(
            torch.zeros_like(groups.position_BM),
            groups.position_BM,
            groups.masks,
            (last,),
            logits=False,
            parts=self.parts,
            residual_BTD=self.behind(like),
        )
        found_BAWD: Tensor = lm.run(feed, groups.kv).taps[last].view(B, A, copies, W, -1).mean(2)
        return found_BAWD

    def open(self, space: Space) -> PpdState:
        return PpdState(self, space)


class PpdState(DraftState):
    """Per slot: the states that the prompt tokens behind the newest accepted token left, and how
    many of them there were (`level_Z`, the state of the dynamic tree)."""

    def __init__(self, drafter: Ppd, space: Space) -> None:
        options, spec, vocab = drafter.options, drafter.spec, drafter.vocab
        size = spec.vocab_size if vocab is None else vocab.size
        shortlist = options.shortlist(size)
        size = size if shortlist is None else min(size, shortlist.candidates)
        self.chances = tuple(level[:size] for level in options.levels())
        self.copies, self.device, self.vocab = options.copies, space.device, vocab
        self.behind_each = options.behind_each
        self.num_ranks = max(len(level) for level in self.chances)
        shape = (space.num_slots, options.num_heads, spec.hidden_size)
        self.ready_ZWD = torch.zeros(shape, dtype=space.dtype, device=space.device)
        self.level_Z = torch.zeros(space.num_slots, dtype=torch.long, device=space.device)
        self.last = spec.num_layers
        with torch.no_grad():
            self.tokens_MD = drafter.module().detach().flatten(0, 1).to(space.device, space.dtype)
        self._head = served_head(drafter.head_weight(), drafter.options)
        self._tables: dict[int, PromptTables] = {}
        self._shown: PromptTables | None = None

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self.level_Z[slot] = 0

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        """Every row's tree is that of its own state."""
        self._shown = None
        if budget.nodes <= 0 or budget.depth <= 0:
            return empty_tree(len(view.slots), self.device)
        self._shown = tables = self._table(budget.nodes)
        level_B = self.level_Z[view.slot_B]
        level_BN, rank_BN = tables.level_XN[level_B], tables.rank_XN[level_B]
        token_BN = self._guesses(view)[
            torch.arange(len(level_B), device=self.device)[:, None], level_BN, rank_BN
        ]
        tree = DraftTree(
            token_BN,
            tables.parent_XN[level_B],
            rank_BN,
            tables.valid_XN[level_B] & (level_BN < budget.depth),
            NodeKind.POINT,
            min(len(self.chances), budget.depth),
        )
        embedded_BMD = self.tokens_MD[tables.embedding_XM[level_B]]
        parent_BM = tables.prompt_parent_XM[level_B]
        token_BM, deepest = torch.zeros_like(parent_BM), 2 * len(self.chances)
        return with_probes(tree, token_BM, parent_BM, deepest, embedded_BMD)

    @torch.no_grad()
    def _guesses(self, view: RoundView) -> Tensor:
        """[B, W, C]: the best ids of each place; broken embeddings show in the logits."""
        ready_BWD = self.ready_ZWD[view.slot_B] + 0 * self.tokens_MD.sum()
        logits_BWK = view.shown(read_head(ready_BWD, self._head))
        best_BWC = logits_BWK.topk(self.num_ranks, dim=-1).indices
        return best_BWC if self.vocab is None else self.vocab.ids_K[best_BWC]

    def _table(self, nodes: int) -> PromptTables:
        if nodes not in self._tables:
            if self.behind_each is None:
                plan = plan_trees(self.chances, nodes, self.copies)
            else:
                plan = even_trees(self.chances, nodes, self.behind_each, self.copies)
            self._tables[nodes] = PromptTables.of(plan, self.copies, self.device)
        return self._tables[nodes]

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        slot_B, tree, tables = outcome.view.slot_B, outcome.tree, self._shown
        if tables is None or tree.num_probes != tables.first_XM.shape[1] or not tree.num_probes:
            self.level_Z[slot_B] = 0  # no prompt token was read
            return
        level_B, first = self.level_Z[slot_B], tree.num_nodes - tree.num_probes
        accepted_B = (outcome.path_BP >= 0).sum(1) - 1
        end_B1 = outcome.path_BP.gather(1, accepted_B[:, None])
        behind_BM = tree.parent_BN.gather(1, first + tables.first_XM[level_B]) + 1
        is_own_BM = tables.is_prompt_XM[level_B] & (behind_BM == end_B1)
        place_W = torch.arange(len(self.chances), device=slot_B.device)
        is_at_BWM = is_own_BM[:, None] & (tables.distance_XM[level_B][:, None] == place_W[:, None])
        count_BW = is_at_BWM.sum(2)
        sum_BWD = is_at_BWM.float() @ outcome.probe_taps[self.last].float()
        ready_BWD = sum_BWD / count_BW.clamp(min=1)[:, :, None]
        self.ready_ZWD[slot_B] = ready_BWD.to(self.ready_ZWD.dtype)
        self.level_Z[slot_B] = (count_BW > 0).sum(1)


FAMILY = Family(
    name="ppd",
    summary=(
        "Learned prompt tokens stand behind every drafted token in the forward that verifies the "
        "draft, and say what may come behind it: no drafter runs at all. A few embeddings are all "
        "that is trained; a round costs some more rows of the target's forward, so it pays where "
        "those are nearly free."
    ),
    paper="https://arxiv.org/abs/2405.18628",
    options=PpdOptions,
    build=Ppd,
    trainable=True,
    policies=("direct", "prompt-tree"),
    borrows_layers=True,
)
