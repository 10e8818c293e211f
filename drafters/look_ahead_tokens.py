"""PaSS (arXiv 2311.13581): the target reads look-ahead tokens and says several tokens at once.

A round reads the newest token and the learned embeddings of `num_heads` - 1 look-ahead tokens
behind it, in one forward of the target: the newest token predicts the next one, look-ahead token i
predicts the one that comes i later (Ak). They are sampled, and a second forward verifies them. The
target is frozen; the embeddings, learned behind random places of the text against what the target
says there, are all there is to train. The first draft is the target's own and always accepted, so
that a round of two forwards emits two tokens at least.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, L positions, M new nodes, Q picked
rows, R flat rows, S sequence, T fed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Needs, RoundView, Space
from specctl.core.language_model import Borrowed, Feed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.sub_layers import NOTHING
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import AlignedRows, ahead_mask, aim
from specctl.drafters.losses.head_losses import (
    LinearHead,
    head_loss,
    teacher_logits,
    weighted_sum,
)
from specctl.drafters.nets.heads import cut_rows, head_rows
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.nets.self_drafter import SelfDrafter
from specctl.drafters.option_checks import Count, Within
from specctl.drafters.states.borrowed_state import KnownTokensState, groups_behind
from specctl.models.kernels import linear, prepared

LOUD = 16.0  # embeddings are kept this much smaller, to learn as fast as other weights do


@dataclass(frozen=True, slots=True)
class LookAheadOptions(HeadOptions):
    """`num_heads` tokens are drafted, by the newest token and `num_heads` - 1 look-ahead tokens;
    trained behind `anchors` positions of each row."""

    num_heads: Annotated[int, Within(2)] = 4
    anchors: Count = 32


class LookAheadNet(nn.Module):
    """The embeddings, as they stand in front of the first layer."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(count, width) * 0.02 / LOUD)

    def forward(self) -> Tensor:
        return self.tokens * LOUD


class LookAhead(SelfDrafter):
    """All layers of the target run."""

    family = "pass"
    module: LookAheadNet
    options: LookAheadOptions

    def __init__(
        self, options: LookAheadOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.module = LookAheadNet(options.num_heads - 1, spec.hidden_size)
        self._head_KD: Tensor | None = None

    @property
    def attention(self) -> tuple[int, ...]:
        return tuple(range(self.spec.num_layers))

    def needs(self) -> Needs:
        return Needs(self.attention, teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        self._head_KD = head_rows(borrowed, self.vocab)

    def head_weight(self) -> Tensor:
        """[K, D]: the target's LM head over the draft vocabulary."""
        assert self._head_KD is not None, "bind() the target's LM head first"
        return self._head_KD

    def trimmed(self, vocab: VocabMap) -> LookAhead:
        small = LookAhead(self.options, self.spec, vocab)
        small.module.to(self.module.tokens)
        small.module.load_state_dict(self.module.state_dict())
        small._lm = self._lm
        if self._head_KD is not None:
            small._head_KD = cut_rows(self._head_KD, self.vocab, vocab)
        return small

    def behind(self, newest_BAD: Tensor) -> Tensor:
        """[B, A T, D]: each newest token with the look-ahead tokens behind it."""
        B, A, D = newest_BAD.shape
        ahead = self.module().to(newest_BAD.dtype).expand(B, A, -1, D)
        return torch.cat([newest_BAD[:, :, None], ahead], dim=2).flatten(1, 2)

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over places of decay^i times the loss of predicting 1 + i ahead."""
        options, lm = self.options, self.lm
        anchor_BA = self._anchors(batch)
        ready_BATD = self._read(batch, anchor_BA, lm)
        how, parts = options.compared(), []
        teacher, head = (
            teacher_logits(batch, how, self.vocab),
            LinearHead(self.head_weight().float()),
        )
        for i in range(options.num_heads):
            rows, ready_RD = self._aimed(batch, anchor_BA, i), ready_BATD[:, :, i].flatten(0, 1)
            out = head_loss(ready_RD.float(), head, rows, self.vocab, how, teacher)
            parts.append((options.decay**i, out))
        return weighted_sum(parts)

    def _anchors(self, batch: TrainBatch) -> Tensor:
        """[B, A]: positions in random order, those behind which all places have something to say
        first."""
        wanted_BS = sum(ahead_mask(batch, 1 + i).float() for i in range(self.options.num_heads))
        chance_BS = wanted_BS + torch.rand(batch.ids_BS.shape, device=batch.ids_BS.device)
        most = min(self.options.anchors, chance_BS.shape[1])
        return chance_BS.topk(most, dim=1).indices

    def _aimed(self, batch: TrainBatch, anchor_BA: Tensor, index: int) -> AlignedRows:
        """What place `index` behind the anchors is trained on; its rows count anchors."""
        rows, (B, S) = aim(batch, 1 + index), batch.ids_BS.shape
        place_BS = torch.full((B, S), -1, device=anchor_BA.device)
        number_BA = torch.arange(anchor_BA.numel(), device=anchor_BA.device).view_as(anchor_BA)
        place_BS.scatter_(1, anchor_BA, number_BA)
        place_Q = place_BS.flatten()[rows.row_Q]
        return replace(rows.only(place_Q >= 0), row_Q=place_Q[place_Q >= 0])

    def _read(self, batch: TrainBatch, anchor_BA: Tensor, lm: LanguageModel) -> Tensor:
        """[B, A, T, D]: what the LM head reads at the anchors and behind them. Each sees the text
        before its anchor, as the target saw it, and its own look-ahead tokens up to itself."""
        (B, A), T, last = anchor_BA.shape, self.options.num_heads, self.spec.num_layers
        groups = groups_behind(lm, self.attention, batch, anchor_BA, T, replaces_anchor=True)
        to_BAD = anchor_BA[:, :, None].expand(-1, -1, self.spec.hidden_size)
        x_BMD = self.behind(batch.taps[0].to(lm.dtype).gather(1, to_BAD))
        none_BM = torch.zeros_like(groups.position_BM)
        feed = Feed(none_BM, groups.position_BM, groups.masks, (last,), False, residual_BTD=x_BMD)
        return lm.run(feed, groups.kv).taps[last].view(B, A, T, -1)

    def open(self, space: Space) -> LookAheadState:
        return LookAheadState(self, space)


class LookAheadState(KnownTokensState):
    """All of a draft is there when its first token is asked for."""

    may_draft_nothing = True

    def __init__(self, drafter: LookAhead, space: Space) -> None:
        super().__init__(drafter.lm, drafter.attention, space, extra=drafter.options.num_heads)
        self.drafter, self._depth = drafter, 0
        self._ready_BMD = torch.empty(0)
        self._head = prepared(drafter.head_weight())

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        lm, T, last = self.lm, self.drafter.options.num_heads, self.lm.spec.num_layers
        kept = [self.num_known[slot] for slot in view.slots]
        root_B1, at_B1 = view.root_B[:, None], view.kept_len_B[:, None]
        same = kept[0] if min(kept) == max(kept) else None
        self.kv.begin(view.slots, view.slot_B, view.kept_len_B, T, max(kept) + T, same)
        any_mask = lm.chain_masks(view.kept_len_B, 1, max(kept) + T)
        first = lm.run(
            Feed(root_B1, self.within(at_B1), any_mask, (0,), False, None, NOTHING), None
        )
        position_BT = self.within(at_B1 + torch.arange(T, device=at_B1.device))
        x_BTD = self.drafter.behind(first.taps[0])
        masks = lm.chain_masks(view.kept_len_B, T, max(kept) + T)
        none_BT = torch.zeros_like(position_BT)
        feed = Feed(none_BT, position_BT, masks, (last,), False, residual_BTD=x_BTD)
        self._ready_BMD, self._depth = lm.run(feed, self.kv).taps[last], 0
        return linear(self._ready_BMD[:, 0], self._head)

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        self._depth += 1
        if self._depth < self.drafter.options.num_heads:
            return linear(self._ready_BMD[:, self._depth], self._head)[:, None]
        size = self.drafter.head_weight().shape[0]
        shape = (*token_BM.shape, size)
        return torch.full(shape, -torch.inf, device=token_BM.device)

    def hidden(self) -> Tensor:
        return self._ready_BMD[:, min(self._depth, self._ready_BMD.shape[1] - 1)]


FAMILY = Family(
    name="pass",
    summary=(
        "The target drafts several tokens in one forward, at a few look-ahead tokens whose "
        "embeddings are all that is trained (thousands of weights), and verifies them in a second. "
        "Every round emits two tokens at least; it pays where more than two of a draft are taken "
        "and memory for nothing else is left."
    ),
    paper="https://arxiv.org/abs/2311.13581",
    options=LookAheadOptions,
    build=LookAhead,
    trainable=True,
    policies=("chain",),
)
