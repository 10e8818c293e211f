"""HeadDrafter: heads on the target's last state f_t, the frame of every method of that kind.

Position t is the newest one that the target has read, t + 1 the root. Head i predicts token
t + 2 + i. From f_t a family makes a *carry* (`begin`), takes the tokens t + 1, t + 2, ... into it
one by one (`read`), and makes of it the state that an LM head reads (`ready`). Heads that do not
look at drafted tokens (Medusa, blockwise) leave the carry as it is. Training runs the same
functions over whole rows of text, so that both score a token alike.
Letters: A anchors, B rows, D hidden width, I input width, K draft vocabulary, O output width, R
flat rows, S sequence, T fed tokens, V target vocabulary, X any axes, Y carry.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import DraftState, Needs, Space
from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows, aim, shifted
from specctl.drafters.losses.head_losses import (
    LinearHead,
    TeacherLogits,
    feature_loss,
    head_loss,
    joined,
    teacher_logits,
    weighted_sum,
    with_stretch,
)
from specctl.drafters.losses.pace import paced
from specctl.drafters.nets.heads import BorrowingDrafter, cut_rows, draft_size, head_rows
from specctl.drafters.nets.prefix import PrefixNet, PrefixState
from specctl.drafters.states.head_state import DraftFeatures, GroundedState, LastState


@dataclass(frozen=True, slots=True)
class HeadLearned:
    """What head `index` has just learned from: the states its LM head read, which rows of them, the
    LM head, and the target's distributions (None: it learned from the text). `others`: the states
    of further passes of the same head, of which a family makes losses of its own."""

    index: int
    ready_RO: Tensor
    rows: AlignedRows
    head: LinearHead
    teacher: TeacherLogits | None
    others: tuple[Tensor, ...] = ()


class HeadDrafter(BorrowingDrafter):
    """What a family leaves to the frame: binding, trimming, the loss, the memory while serving. Its
    options are `HeadOptions`."""

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.module = self.make_net(draft_size(vocab, spec.vocab_size))
        self._shared_KD: Tensor | None = None

    # -- what a family gives --------------------------------------------------------------------

    @property
    def feature_weight(self) -> float:
        """Of the distance between what heads read and the target's state; an option, or 0."""
        return float(getattr(self.options, "feature_weight", 0.0))

    @abstractmethod
    def make_net(self, rows: int) -> nn.Module:
        """Its module; LM heads of its own have so many rows."""

    def own_heads(self) -> list[nn.Linear]:
        """LM heads of its own, by head (the last serves later ones); none = the target's."""
        return []

    def vocab_layers(self) -> list[nn.Linear]:
        """All layers with one row per id of the draft vocabulary."""
        return self.own_heads()

    @abstractmethod
    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        """[X, O]: what the LM head of head `depth` reads."""

    def begin(self, state_XD: Tensor) -> Tensor:
        """[X, Y]: the carry that has read no token yet."""
        return state_XD

    def read(self, depth: int, carry_XY: Tensor, ids_X: Tensor) -> Tensor:
        """[X, Y]: the carry after token t + 1 + depth."""
        return carry_XY

    @property
    def num_stages(self) -> int:
        """From depth num_stages - 1 on, every token is read and every head computed alike."""
        return int(self.options.num_heads)

    def start_heads(self, rows_KD: Tensor) -> None:
        """Fill fresh LM heads; by default with the target's rows."""
        for head in self.own_heads():
            head.weight.copy_(rows_KD)

    def prefix(self) -> PrefixNet | None:
        """Layers of its own between the target's states and the heads, if it has any."""
        return None

    def beside(self, out: LossOut, learned: HeadLearned, batch: TrainBatch) -> LossOut:
        """A head's loss with whatever else is learned from its rows."""
        if self.feature_weight == 0:
            return out
        state_RD = batch.taps[self.spec.num_layers].flatten(0, 1)
        term = feature_loss(learned.ready_RO, learned.rows, state_RD)
        return joined(out, term, self.feature_weight)

    def rows(self, state_BTD: Tensor, next_ids_BT: Tensor) -> Tensor:
        """[B, T, D]: what those layers read: the state at t, in the light of token t + 1."""
        return state_BTD

    def heads_now(self) -> Collection[int]:
        """The heads that learn from this batch."""
        return range(self.options.num_heads)

    def anchors(self, batch: TrainBatch) -> Tensor | None:
        """[B, A]: the positions that drafts begin from while training; None = all."""
        return None

    def aimed(self, index: int, batch: TrainBatch, anchor_BA: Tensor | None) -> AlignedRows:
        """What head `index` learns from."""
        return aim(batch, 2 + index)

    # -- the frame ------------------------------------------------------------------------------

    def context(self, batch: TrainBatch) -> Tensor:
        """[B, S, D]: the states that drafting begins from, at every position."""
        state_BSD, prefix = self.gathered(batch.own_taps()), self.prefix()
        if prefix is None:
            return state_BSD
        return prefix.over(self.rows(state_BSD, batch.own(shifted(batch.ids_BS, 1))), batch)

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        """[..., I]: what is read of the target; its last state."""
        return taps[self.spec.num_layers].to(self.dtype)

    def features(self, space: Space) -> DraftFeatures:
        """The same while serving."""
        like, prefix = next(self.module.parameters()), self.prefix()
        if prefix is None:
            return LastState(self.spec.num_layers, space.num_slots, self.spec.hidden_size, like)
        return PrefixState(prefix, self.rows, self.gathered, space, like)

    def needs(self) -> Needs:
        return Needs((self.spec.num_layers,), teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        self.borrowed = borrowed
        if not self.own_heads():
            self._shared_KD = head_rows(borrowed, self.vocab)
        elif self._is_fresh:
            with torch.no_grad():
                self.start_heads(head_rows(borrowed, self.vocab))
        self._is_fresh = False

    def trimmed(self, vocab: VocabMap) -> Self:
        small = type(self)(self.options, self.spec, vocab)
        weights, own = dict(self.module.state_dict()), {id(head) for head in self.vocab_layers()}
        for name, part in self.module.named_modules():
            if id(part) in own:
                weights[f"{name}.weight"] = cut_rows(weights[f"{name}.weight"], self.vocab, vocab)
        if self._shared_KD is not None:
            small._shared_KD = cut_rows(self._shared_KD, self.vocab, vocab)
        first = next(self.module.parameters())
        small.module.to(device=first.device, dtype=first.dtype)
        small.module.load_state_dict(weights)
        small.borrowed, small._is_fresh = self.borrowed, self._is_fresh
        return small

    def open(self, space: Space) -> DraftState:
        return GroundedState(self, self.features(space))

    def head_weights(self) -> list[Tensor]:
        """[K, O] LM heads: those of its own, or the one of the target."""
        own = self.own_heads()
        if own:
            return [head.weight for head in own]
        assert self._shared_KD is not None, "bind() the target's LM head first"
        return [self._shared_KD.to(self.dtype)]

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        """[B, S, O] per head: what its LM head reads, at every position (or the anchors)."""
        carry_BSY = self.begin(self.context(batch))
        for i in range(self.options.num_heads):
            carry_BSY = self.read(i, carry_BSY, batch.own(shifted(batch.ids_BS, 1 + i)))
            yield self.ready(i, carry_BSY)

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over heads of the loss of predicting 2 + i ahead, times decay^i or as D-PACE weighs
        it."""
        options = self.options
        how = options.compared()
        teacher, weights, now = (
            teacher_logits(batch, how, self.vocab),
            self.head_weights(),
            self.heads_now(),
        )
        parts, states = [], list[Tensor]()
        heads = self._heads(batch, weights, teacher)
        if options.d_pace is not None:  # a head's weights depend on all heads
            drafted = list(heads)
            given = [(each.ready_RO, each.head, each.rows) for each in drafted]
            found = paced(given, self.vocab, how, teacher, options.d_pace)
            heads = (replace(each, rows=rows) for each, rows in zip(drafted, found, strict=True))
        for each in heads:
            if batch.part is not None:
                states.append(each.ready_RO)
            if each.index not in now:
                continue
            out = head_loss(each.ready_RO, each.head, each.rows, self.vocab, how, teacher)
            share = options.decay**each.index if options.d_pace is None else 1.0
            parts.append((share, self.beside(out, each, batch)))
        total = with_stretch(weighted_sum(parts), states)
        return total if len(parts) == options.num_heads else replace(total, metrics={})

    def _heads(
        self, batch: TrainBatch, weights: Sequence[Tensor], teacher: TeacherLogits | None
    ) -> Iterator[HeadLearned]:
        """One after another, so that the states of a head whose loss is taken can be let go."""
        anchor_BA = self.anchors(batch)
        for i, ready_BSO in enumerate(self.unroll(batch, anchor_BA)):
            rows = self.aimed(i, batch, anchor_BA)
            head = LinearHead(weights[min(i, len(weights) - 1)])
            yield HeadLearned(i, ready_BSO.flatten(0, 1), rows, head, teacher)
