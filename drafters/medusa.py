"""Medusa-1 (arXiv 2401.10774): heads on the target's last state, each one token further ahead.

Head i reads f_t (the state that feeds the target's LM head) and predicts token t + 2 + i; the
target's own head predicts t + 1. The proposal is a static sparse tree over the heads' best ranks,
so one pass drafts everything. The heads can also be grown step by step by a tree policy: then the
logits after a node at depth d are those of head d, whatever the node's token.
Letters: B rows, S slots, M nodes, N tree nodes, D width, H heads, K draft vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.drafters.parts.align import aim
from specctl.drafters.parts.base import (
    Borrowed,
    Budget,
    Drafter,
    Family,
    Needs,
    Outcome,
    RoundView,
    Space,
    StepState,
)
from specctl.drafters.parts.batch import LossOut, TrainBatch
from specctl.drafters.parts.heads import ResBlock, cut_rows, draft_size, head_rows
from specctl.drafters.parts.kernels import Weight, can_pack, linear, pack
from specctl.drafters.parts.losses import (
    LinearHead,
    LossOptions,
    check_kind,
    head_loss,
    judge_of,
    weighted_sum,
)
from specctl.drafters.parts.spec import ModelSpec
from specctl.drafters.parts.template import (
    Path,
    Template,
    check_paths,
    compile_template,
    greedy_paths,
)
from specctl.drafters.parts.tree import DraftTree, NodeKind, empty_tree
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.errors import RecipeError

HEADS = ("own", "shared")
MAX_RANK = 10
DEFAULT_NODES = 24
RANK_SHARE = (0.55, 0.14, 0.07, 0.045, 0.03, 0.02)  # of the first head; later heads fade
HEAD_FADE = 0.75


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """`num_heads` heads of `num_blocks` residual blocks. `head`: "own" gives each head its own LM
    head, started from the target's rows and trained; "shared" reads through the target's frozen
    LM head and trains the blocks only. Head i weighs decay^i. `tree`: rank paths, most useful
    first, for example [[0], [0, 0], [1]]; None = a tree from a typical acceptance profile."""

    num_heads: int = 4
    num_blocks: int = 1
    head: str = "own"
    loss: str = "kl"
    temperature: float = 1.0
    decay: float = 0.8
    tree: tuple[tuple[int, ...], ...] | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_kind(self.loss, "drafter.options.loss")
        if self.head not in HEADS:
            raise RecipeError(
                f"unknown head {self.head!r}",
                where="drafter.options.head",
                expected="one of " + ", ".join(HEADS),
                do="write head: own",
            )
        if self.tree is not None:
            paths = tuple(tuple(int(rank) for rank in path) for path in self.tree)
            object.__setattr__(self, "tree", paths)
            check_paths(paths, self.num_heads, MAX_RANK, "drafter.options.tree")


def default_tree(num_heads: int) -> tuple[Path, ...]:
    """Paths by a typical profile: each head is HEAD_FADE as accurate as the one before."""
    chances = [[share * HEAD_FADE**i for share in RANK_SHARE] for i in range(num_heads)]
    return greedy_paths(chances, DEFAULT_NODES)


class Medusa(Drafter):
    """Medusa-1: only the heads train."""

    family: ClassVar[str] = "medusa"
    module: nn.ModuleList

    def __init__(
        self, options: MedusaOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        width, size = spec.hidden_size, draft_size(vocab, spec.vocab_size)
        heads = []
        for _ in range(options.num_heads):
            parts: list[nn.Module] = [ResBlock(width) for _ in range(options.num_blocks)]
            if options.head == "own":
                parts.append(nn.Linear(width, size, bias=False))
            heads.append(nn.Sequential(*parts))
        self.module = nn.ModuleList(heads)
        self.tree = options.tree if options.tree is not None else default_tree(options.num_heads)
        self._is_fresh = options.head == "own"
        self._head_KD: Tensor | None = None

    def needs(self) -> Needs:
        return Needs((self.spec.num_layers,), teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        rows_KD = head_rows(borrowed, self.vocab)
        if self.options.head == "shared":
            self._head_KD = rows_KD
        if self._is_fresh:
            with torch.no_grad():
                for head in self.module:
                    _own_head(head).weight.copy_(rows_KD)
            self._is_fresh = False

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self._is_fresh = False

    def trimmed(self, vocab: VocabMap) -> Medusa:
        small = Medusa(self.options, self.spec, vocab)
        weights = dict(self.module.state_dict())
        if self.options.head == "own":
            for name in [n for n in weights if n.split(".")[1] == str(self.options.num_blocks)]:
                weights[name] = cut_rows(weights[name], self.vocab, vocab)
        elif self._head_KD is not None:
            small._head_KD = cut_rows(self._head_KD, self.vocab, vocab)
        first = next(self.module.parameters())
        small.module.to(device=first.device, dtype=first.dtype)
        small.module.load_state_dict(weights)
        small._is_fresh = self._is_fresh
        return small

    def open(self, space: Space) -> MedusaState:
        return MedusaState(self, space)

    def head_logits(self, index: int, state_TD: Tensor) -> Tensor:
        """[..., K]: what head `index` says about token t + 2 + index."""
        weights = self.head_weights()
        weight_KD = weights[index] if self.options.head == "own" else weights[0]
        return F.linear(self.before_head(self.module[index], state_TD), weight_KD)

    def before_head(self, head: nn.Module, state_TD: Tensor) -> Tensor:
        """The state after the residual blocks of one head."""
        for block in list(cast(nn.Sequential, head))[: self.options.num_blocks]:
            state_TD = block(state_TD)
        return state_TD

    def head_weights(self) -> list[Tensor]:
        """[K, D] LM heads: one for each head, or the one that all share."""
        if self.options.head == "own":
            return [_own_head(head).weight for head in self.module]
        assert self._head_KD is not None, "bind() the target's LM head first"
        return [self._head_KD.to(next(self.module.parameters()).dtype)]

    def version(self) -> int:
        """Changes whenever a weight does."""
        return sum(parameter._version for parameter in self.module.parameters())

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over heads of decay^i times the loss of predicting 2 + i ahead (A2)."""
        how = LossOptions(self.options.loss, self.options.temperature, self.options.chunk)
        state_RD = batch.taps[self.spec.num_layers].flatten(0, 1)
        state_RD = state_RD.to(next(self.module.parameters()).dtype)
        judge, weights, parts = judge_of(batch, how), self.head_weights(), []
        for i in range(self.options.num_heads):
            rows = aim(batch, 2 + i)
            head = LinearHead(weights[i] if self.options.head == "own" else weights[0])
            ready_RD = self.before_head(self.module[i], state_RD)
            out = head_loss(ready_RD, head, rows, self.vocab, how, judge)
            parts.append((self.options.decay**i, out))
        return weighted_sum(parts)


def _own_head(head: nn.Module) -> nn.Linear:
    return cast(nn.Linear, cast(nn.Sequential, head)[-1])


class MedusaState(StepState):
    """Per slot: the target's state at the newest position it has read."""

    def __init__(self, drafter: Medusa, space: Space) -> None:
        self.drafter, self.device = drafter, space.device
        weight = next(drafter.module.parameters())
        self.state_SD = torch.zeros(
            space.num_slots, drafter.spec.hidden_size, dtype=weight.dtype, device=weight.device
        )
        self.is_known = [False] * space.num_slots
        self._version, self._heads = drafter.version(), self._packed_heads()
        self._templates: dict[tuple[int, int], Template] = {}
        self._logits_BHK: Tensor | None = None
        self._depths: list[Tensor] = []

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        if self._version != self.drafter.version():
            self._version, self._heads = self.drafter.version(), self._packed_heads()
        self.is_known[slot] = len(tokens) > 1
        self.state_SD[slot] = 0.0
        if self.is_known[slot]:
            self.state_SD[slot] = taps[self.drafter.spec.num_layers][-1].to(self.state_SD.dtype)

    def observe(self, outcome: Outcome) -> None:
        taps_BPD = outcome.taps[self.drafter.spec.num_layers]
        at_B = torch.tensor(outcome.num_accepted, device=taps_BPD.device)
        row_B = torch.arange(len(at_B), device=taps_BPD.device)
        self.state_SD[outcome.view.slot_B] = taps_BPD[row_B, at_B].to(self.state_SD.dtype)
        for slot in outcome.view.slots:
            self.is_known[slot] = True

    # -- one static tree ------------------------------------------------------------------------

    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        num_rows = len(view.slots)
        if not any(self.is_known[slot] for slot in view.slots):
            return empty_tree(num_rows, self.device)
        template = self._template(budget)
        if not template.levels:
            return empty_tree(num_rows, self.device)
        logits_BHK = self._logits(view, len(template.levels))
        ranks = min(MAX_RANK, logits_BHK.shape[-1])
        best_BHR = logits_BHK.topk(ranks, dim=-1).indices
        rank_N = template.rank_N
        token_BN = best_BHR[:, template.depth_N, rank_N.clamp(max=ranks - 1)]
        if self.drafter.vocab is not None:
            token_BN = self.drafter.vocab.ids_K[token_BN]
        valid_BN = (rank_N < ranks).expand_as(token_BN)
        if not all(self.is_known[slot] for slot in view.slots):
            known = [self.is_known[slot] for slot in view.slots]
            valid_BN = valid_BN & torch.tensor(known, device=self.device)[:, None]
        return DraftTree(
            token_BN,
            template.parent_N.expand_as(token_BN),
            rank_N.expand_as(token_BN),
            valid_BN,
            NodeKind.POINT,
            len(template.levels),
            is_chain=template.is_chain,
        )

    def _template(self, budget: Budget) -> Template:
        key = budget.nodes, budget.depth
        if key not in self._templates:
            self._templates[key] = compile_template(self.drafter.tree, *key, self.device)
        return self._templates[key]

    def _logits(self, view: RoundView, num_heads: int) -> Tensor:
        """[B, num_heads, K]."""
        state_BD = self.state_SD[view.slot_B]
        blocks = self.drafter.module[:num_heads]
        states = [self.drafter.before_head(head, state_BD) for head in blocks]
        if len(self._heads) == 1:  # shared (or a single head): one product
            return linear(torch.stack(states, dim=1), self._heads[0])
        pairs = zip(states, self._heads[:num_heads], strict=True)
        return torch.stack([linear(state, head) for state, head in pairs], dim=1)

    def _packed_heads(self) -> list[Weight]:
        return [pack(w) if can_pack(w) else w.detach() for w in self.drafter.head_weights()]

    # -- grown by a policy ----------------------------------------------------------------------

    def root(self, view: RoundView) -> Tensor:
        self._logits_BHK = self._logits(view, self.drafter.options.num_heads)
        self._depths = [torch.zeros_like(view.slot_B[:, None])]
        return self._logits_BHK[:, 0]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """Logits after a node at depth d come from head d; past the last head, from the last."""
        assert self._logits_BHK is not None, "root() begins a round"
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        self._depths.append(depth_BM)
        head_BM1 = depth_BM.clamp(max=self.drafter.options.num_heads - 1)[:, :, None]
        return self._logits_BHK.gather(1, head_BM1.expand(-1, -1, self._logits_BHK.shape[-1]))


def build(options: MedusaOptions, spec: ModelSpec, vocab: VocabMap | None) -> Medusa:
    return Medusa(options, spec, vocab)


FAMILY = Family(
    name="medusa",
    summary=(
        "Small residual heads on the target's last hidden state, each predicting one token further "
        "ahead; a fixed sparse tree of their best guesses is verified at once. Drafting costs one "
        "pass of small layers, whatever the depth, but heads do not see each other's choices, so "
        "acceptance fades quickly with depth. Trains fast and needs no attention cache."
    ),
    paper="https://arxiv.org/abs/2401.10774",
    options=MedusaOptions,
    build=build,
    trainable=True,
    policies=("direct", "static-tree", "dynamic-tree", "chain"),
)
