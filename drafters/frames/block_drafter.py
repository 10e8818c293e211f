"""BlockDrafter: a whole block in one pass of a small network that reads the target's features.

Position t is the newest one that the target has read, t + 1 the root. A block stands behind t:
slot k lies at position t + 1 + k, sees the features up to t and the slots of its own block (all of
them, or those up to k). Its output is what head k - `first_slot` predicts from, so that head i
predicts token t + 2 + i. While training, many blocks stand behind one text (`anchors`); none sees
another, and none sees a feature behind its anchor.
Letters: A anchors, B rows, D hidden width, L positions, M new nodes, O output width, P path,
S sequence, W window, X any axes, Y carry, Z slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Needs, RoundView, Space
from specctl.core.forward.masks import chain_mask
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.kept_rows import KeptRows
from specctl.drafters.attention.seen import AttentionWindow
from specctl.drafters.frames.parallel_heads import ParallelHeads, first_ranks
from specctl.drafters.losses.align import AlignedRows, aim, behind, random_anchors, shifted
from specctl.drafters.nets.block_net import Block, BlockNet
from specctl.drafters.nets.prefix import PrefixState
from specctl.drafters.nets.taps import default_taps, taps_of
from specctl.drafters.states.head_state import DraftFeatures


class BlockDrafter(ParallelHeads):
    """What a family leaves to the frame. Its options have `num_heads` and `anchors`; its
    module has the layers `net` and `norm`, the last norm."""

    first_slot: int = 0  # the slot that head 0 reads; -1 = the newest true row itself
    is_causal: bool = False  # slots see only those before them
    shows_root: bool = False  # a slot that predicts nothing is handed on with the others
    own_taps: tuple[int, ...]

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.tree = first_ranks(options.num_heads)

    # -- what a family gives --------------------------------------------------------------------

    @abstractmethod
    def slot(self, index: int, token_X: Tensor) -> Tensor:
        """[X, D]: what a slot starts from; `token_X` stands there in the text, which only the slots
        that know it while drafting may look at."""

    def slot_of(self, index: int, batch: TrainBatch, anchor_BA: Tensor) -> Tensor:
        """[B, A, D]: the same behind the anchors of a text."""
        return self.slot(index, shifted(batch.ids_BS, 1 + index).gather(1, anchor_BA))

    def counts(self, num_anchors: int) -> list[int]:
        """Blocks that have each slot while training, of so many."""
        return [num_anchors] * self.num_slots

    # -- the frame ------------------------------------------------------------------------------

    @property
    def net(self) -> BlockNet:
        """The module's layers."""
        return cast(BlockNet, self.module.net)

    @property
    def norm(self) -> nn.Module:
        """In front of the LM head."""
        return cast(nn.Module, self.module.norm)

    @property
    def window(self) -> AttentionWindow | None:
        """What slots see of the features; None: all. A family whose options have a `window` has
        injected features, which do not see each other: those out of sight need not be kept."""
        seen: AttentionWindow | None = getattr(self.options, "seen", None)
        return seen

    @property
    def num_slots(self) -> int:
        return int(self.options.num_heads) + self.first_slot

    def needs(self) -> Needs:
        return Needs(self.own_taps, teacher=self.options.loss != "ce", borrow=True)

    def gathered(self, taps: Mapping[int, Tensor]) -> Tensor:
        return torch.cat([taps[tap].to(self.dtype) for tap in self.own_taps], dim=-1)

    def prefix(self) -> BlockNet:
        return self.net

    def features(self, space: Space) -> DraftFeatures:
        return BlockState(self, space, next(self.module.parameters()))

    def slot_bytes(self, space: Space) -> int:
        """A window bounds the rows of a slot, however long texts become."""
        if self.window is not None:
            most = KeptRows(self.window, 1, max(space.max_nodes, self.num_slots) + 2).most
            space = replace(space, max_len=min(space.max_len, most))
        return super().slot_bytes(space)

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        D = self.spec.hidden_size
        ready_XD: Tensor = self.norm(carry_XY[..., depth * D : (depth + 1) * D])
        return ready_XD

    def anchors(self, batch: TrainBatch) -> Tensor:
        return random_anchors(batch, self.options.anchors)

    def aimed(self, index: int, batch: TrainBatch, anchor_BA: Tensor | None) -> AlignedRows:
        rows, slot = aim(batch, 2 + index), index + self.first_slot
        if slot < 0 or anchor_BA is None:
            return rows
        return behind(rows, batch, anchor_BA[:, : self.counts(anchor_BA.shape[1])[slot]])

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        """[B, S, D] per head, zero where no block stands."""
        anchor_BA = self.anchors(batch) if anchor_BA is None else anchor_BA
        for index, out_BAD in enumerate(self.drafted(batch, anchor_BA)):
            is_true = index + self.first_slot < 0  # the newest true rows themselves
            yield out_BAD if is_true else self.placed(out_BAD, batch, anchor_BA)

    def drafted(self, batch: TrainBatch, anchor_BA: Tensor) -> Iterator[Tensor]:
        """[B, A, D] per head behind the anchors; of a head that reads true rows [B, S, D]."""
        known_BSD, outs = self.outputs(batch, anchor_BA)
        for i in range(self.options.num_heads):
            is_true = i + self.first_slot < 0
            yield self.norm(known_BSD if is_true else outs[i + self.first_slot])

    def outputs(self, batch: TrainBatch, anchor_BA: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """What the layers make of the true rows, [B, S, D], and of each slot, [B, A, D]."""
        counts = self.counts(anchor_BA.shape[1])
        block = Block.of(batch, anchor_BA, counts, self.is_causal, self.window)
        slots = []
        for index, count in enumerate(counts):
            slots.append(self.slot_of(index, batch, anchor_BA[:, :count]))
        state_BSD = self.gathered(batch.own_taps())
        x_BSD = self.rows(state_BSD, batch.own(shifted(batch.ids_BS, 1)))
        known_BSD, out_BMD = self.net.spread(x_BSD, torch.cat(slots, dim=1), batch, block)
        return known_BSD, torch.split(out_BMD, counts, dim=1)

    def placed(self, out_BAO: Tensor, batch: TrainBatch, anchor_BA: Tensor) -> Tensor:
        """[B, S, O]: what stands behind the anchors, zero elsewhere."""
        at_BAO = (anchor_BA - batch.start)[:, : out_BAO.shape[1], None].expand_as(out_BAO)
        length = batch.own(batch.ids_BS).shape[1]
        blank_BSO = out_BAO.new_zeros(len(out_BAO), length, out_BAO.shape[-1])
        return blank_BSO.scatter(1, at_BAO, out_BAO)


class TappedBlocks(BlockDrafter):
    """Blocks that read the depths their options name (`taps`; None: those that the family chooses,
    by default EAGLE-3's)."""

    chosen_taps = staticmethod(default_taps)

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        self.own_taps = taps_of(options.taps, spec, self.chosen_taps)
        super().__init__(replace(options, taps=self.own_taps), spec, vocab)


class BlockState(PrefixState):
    """Features of live rows in the cache, and a block behind them whenever a round begins."""

    net: BlockNet

    def __init__(self, drafter: BlockDrafter, space: Space, like: Tensor) -> None:
        extra = drafter.num_slots
        given = drafter.net, drafter.rows, drafter.gathered, space, like
        super().__init__(*given, extra, drafter.window)
        self.drafter = drafter

    def _take(self, x_BWD: Tensor, position_BW: Tensor, mask: Tensor) -> Tensor:
        return self.net.take(x_BWD, position_BW, mask, self.kv)

    @torch.no_grad()
    def at(self, view: RoundView) -> Tensor:
        """[B, H * D]: the states of all heads, one after another."""
        drafter, P, kept_B = self.drafter, self.drafter.num_slots, view.kept_len_B
        x_BPD = torch.stack([drafter.slot(k, view.root_B) for k in range(P)], dim=1)
        position_BP = kept_B[:, None] + torch.arange(P, device=kept_B.device)
        start_B, most = self._entries(view)
        span = most + P
        mask = chain_mask(start_B, P, span)
        if not drafter.is_causal:
            mask = mask[:, :, -1:].expand_as(mask)
        if self._kept is not None:
            mask = self._kept.within(mask, start_B)
        self.kv.begin(view.slots, view.slot_B, start_B, P, span)
        out_BPD: Tensor = self.net(x_BPD, position_BP, mask, self.kv)
        if drafter.first_slot < 0:
            out_BPD = torch.cat([self.state_ZD[view.slot_B][:, None], out_BPD], dim=1)
        first = 0 if drafter.shows_root else max(drafter.first_slot, 0)
        return out_BPD[:, first:].flatten(1)
