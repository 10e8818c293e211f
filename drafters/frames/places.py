"""PlacesDrafter: drafts several tokens at once, at places that the target's layers read.

Behind a token stand `num_heads` places, which the target reads in one forward with the text before
them. Place i says the token that comes `reach` + i after the one it stands behind. A family makes
what stands at the places, and says which layers read it.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, M new nodes, Q picked rows, R flat
rows, S sequence, T fed tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Needs
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.shared_head import SharedHeadDrafter
from specctl.drafters.losses.align import AlignedRows, ahead_mask, aim
from specctl.drafters.losses.head_losses import (
    LinearHead,
    head_loss,
    teacher_logits,
    weighted_sum,
)
from specctl.drafters.losses.pace import paced
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.option_checks import Count
from specctl.drafters.states.borrowed_state import groups_behind


@dataclass(frozen=True, slots=True)
class PlacesOptions(HeadOptions):
    """`num_heads` places; trained behind `anchors` positions of each row."""

    anchors: Count = 32


class PlacesDrafter(SharedHeadDrafter):
    """What a family leaves to the frame: the loss."""

    teaches_target = True
    reach: ClassVar[int]
    replaces_anchor: ClassVar[bool]  # the first place is the token's own

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.module = self.make_net()

    # -- what a family gives --------------------------------------------------------------------

    @abstractmethod
    def make_net(self) -> nn.Module:
        """Its module."""

    @property
    @abstractmethod
    def first(self) -> int:
        """The layer in front of which the places stand; it and all above it read them."""

    @abstractmethod
    def behind(self, state_BAD: Tensor) -> Tensor:
        """[B, A T, D]: what stands at the places, made of the residuals of the tokens they stand
        behind, in front of the same layer."""

    def num_places(self, progress: float) -> int:
        """The places that learn after this share of the training: the first ones."""
        return int(self.options.num_heads)

    # -- the frame ------------------------------------------------------------------------------

    @property
    def attention(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.spec.num_layers))

    @property
    def parts(self) -> SubLayers:
        """What reads the places."""
        return SubLayers.span(self.first, self.spec.num_layers)

    def needs(self) -> Needs:
        return Needs(self.attention, teacher=self.options.loss != "ce", borrow=True)

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over places of the loss of predicting `reach` + i ahead, times decay^i or D-PACE's
        weights."""
        anchor_BA = self._anchors(batch)
        ready_BATD = self._read(batch, anchor_BA, self.lm)
        return weighted_sum(self._compared(batch, anchor_BA, ready_BATD))

    def _compared(
        self, batch: TrainBatch, anchor_BA: Tensor, ready_BATD: Tensor
    ) -> list[tuple[float, LossOut]]:
        """The loss of each place, and what it weighs."""
        options = self.options
        how, places, parts = options.compared(), [], []
        teacher, head = (
            teacher_logits(batch, how, self.vocab),
            LinearHead(self.head_weight().float()),
        )
        for i in range(self.num_places(batch.progress)):
            rows, ready_RD = self._aimed(batch, anchor_BA, i), ready_BATD[:, :, i].flatten(0, 1)
            places.append((ready_RD.float(), head, rows))
        if options.d_pace is not None:
            found = paced(places, self.vocab, how, teacher, options.d_pace)
            places = [(*place[:2], rows) for place, rows in zip(places, found, strict=True)]
        for i, (ready_RD, head, rows) in enumerate(places):
            share = options.decay**i if options.d_pace is None else 1.0
            out = head_loss(ready_RD, head, rows, self.vocab, how, teacher)
            parts.append((share, out))
        return parts

    def _anchors(self, batch: TrainBatch) -> Tensor:
        """[B, A]: positions in random order, those behind which all places have something to say
        first."""
        wanted_BS = torch.zeros(batch.ids_BS.shape, device=batch.ids_BS.device)
        for i in range(self.num_places(batch.progress)):
            wanted_BS += ahead_mask(batch, self.reach + i)
        chance_BS = wanted_BS + torch.rand(batch.ids_BS.shape, device=batch.ids_BS.device)
        most = min(self.options.anchors, chance_BS.shape[1])
        return chance_BS.topk(most, dim=1).indices

    def _aimed(self, batch: TrainBatch, anchor_BA: Tensor, index: int) -> AlignedRows:
        """What place `index` behind the anchors is trained on; its rows count anchors."""
        rows, (B, S) = aim(batch, self.reach + index), batch.ids_BS.shape
        place_BS = torch.full((B, S), -1, device=anchor_BA.device)
        number_BA = torch.arange(anchor_BA.numel(), device=anchor_BA.device).view_as(anchor_BA)
        place_BS.scatter_(1, anchor_BA, number_BA)
        place_Q = place_BS.flatten()[rows.row_Q]
        return replace(rows.only(place_Q >= 0), row_Q=place_Q[place_Q >= 0])

    def _read(self, batch: TrainBatch, anchor_BA: Tensor, lm: LanguageModel) -> Tensor:
        """[B, A, T, D]: what the LM head reads at the places behind the anchors. Each sees the text
        up to its anchor, as the target saw it, and its own places up to itself."""
        (B, A), T = anchor_BA.shape, self.options.num_heads
        groups = groups_behind(
            lm, self.attention, batch, anchor_BA, T, replaces_anchor=self.replaces_anchor
        )
        to_BAD = anchor_BA[:, :, None].expand(-1, -1, self.spec.hidden_size)
        x_BMD = self.behind(batch.taps[self.first].to(lm.dtype).gather(1, to_BAD))
        none_BM = torch.zeros_like(groups.position_BM)
        feed = Feed(none_BM, groups.position_BM, groups.masks, logits=False, residual_BTD=x_BMD)
        return self.through(feed, groups.kv, lm).view(B, A, T, -1)

    def through(self, feed: Feed, kv: SlotKV, lm: LanguageModel) -> Tensor:
        """[B, M, D]: what the LM head reads of the residuals that are fed, in front of layer
        `first`, once `parts` have read them."""
        last = self.spec.num_layers
        return lm.run(replace(feed, taps=(last,), parts=self.parts), kv).taps[last]
