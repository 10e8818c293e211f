"""CorrectedBlocks: DFlash's block with a correction (see `nets/correction.py`), the frame of DSpark
and its relatives. While training, the states of a block's slots and what the correction makes of
the text's tokens stand side by side, and one matrix, the LM head beside `up`, reads both.
Letters: A anchors, B rows, D hidden width, K draft vocabulary, O output width, P path, Q picked
rows, R flat rows, S sequence, X any axes, Y carry.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import DraftState, Space
from specctl.drafters.blocks.corrected_state import CorrectedState
from specctl.drafters.blocks.dflash import InjectedBlocks
from specctl.drafters.corrections.correction import Correction, FilledBlock, LowRankBias
from specctl.drafters.frames.block_drafter import BlockState
from specctl.drafters.frames.head_drafter import HeadLearned
from specctl.drafters.losses.align import shifted
from specctl.drafters.losses.head_losses import LinearHead, head_loss, joined


class CorrectedBlocks(InjectedBlocks):
    """What a family leaves to the frame: how it serves, and what its LM head learns from."""

    splits_rows = True
    first_slot = 0

    @property
    @abstractmethod
    def correction(self) -> Correction:
        """Over the weights as they are now."""

    def features(self, space: Space) -> BlockState:
        return BlockState(self, space, next(self.module.parameters()))

    def open(self, space: Space) -> DraftState:
        return CorrectedState(self, self.features(space))

    def base_head(self) -> Tensor:
        """[K, D]: what makes U of the slots' states: the target's rows."""
        return super().head_weights()[0]

    def slot_states(self, state_XY: Tensor) -> Tensor:
        """[X, P, D]: what it reads of the block's outputs, one slot after another."""
        every_XPD: Tensor = self.norm(torch.unflatten(state_XY, -1, (-1, self.spec.hidden_size)))
        return every_XPD

    def blocks(self, batch: TrainBatch, anchor_BA: Tensor) -> FilledBlock:
        """The blocks behind the anchors of a text, X = B A."""
        states_BAPD = torch.stack(list(self.drafted(batch, anchor_BA)), dim=2)
        return FilledBlock(states_BAPD.flatten(0, 1))

    def drafted_from(self, batch: TrainBatch, anchor_BA: Tensor) -> Tensor:
        """[B A, P]: the tokens that those blocks read: the root and the ones behind it."""
        steps = range(1, 1 + int(self.options.num_heads))
        ids = [shifted(batch.ids_BS, step).gather(1, anchor_BA) for step in steps]
        return torch.stack(ids, dim=2).flatten(0, 1)


class LowRankBlocks(CorrectedBlocks):
    """Blocks whose correction is a bias of low rank; the LM head reads [h, f]."""

    @property
    @abstractmethod
    def correction(self) -> LowRankBias: ...

    def head_weights(self) -> list[Tensor]:
        """[K, D + O]: the target's rows beside the correction's."""
        return [torch.cat([self.base_head(), self.correction.up_KO], dim=1)]

    def unroll(self, batch: TrainBatch, anchor_BA: Tensor | None = None) -> Iterator[Tensor]:
        anchor_BA = self.anchors(batch) if anchor_BA is None else anchor_BA
        block, ids_XP = self.blocks(batch, anchor_BA), self.drafted_from(batch, anchor_BA)
        factors_XPO = self.correction.forced_factors(block, ids_XP)
        ready_XPO = torch.cat([block.states_XPD, factors_XPO.to(block.states_XPD)], dim=-1)
        for ready_XO in ready_XPO.unbind(1):
            yield self.placed(torch.unflatten(ready_XO, 0, anchor_BA.shape), batch, anchor_BA)

    def with_base(
        self, out: LossOut, learned: HeadLearned, base: float, corrected: float
    ) -> LossOut:
        """The mean of the loss of the block's own logits, weighed, with that of the corrected
        ones."""
        if base == 0:
            return out
        D = self.spec.hidden_size
        head = LinearHead(self.base_head())
        how = self.options.compared()
        given = learned.ready_RO[:, :D], head, learned.rows, self.vocab, how, learned.teacher
        term = head_loss(*given)
        named = {f"base_{name}": pair for name, pair in term.metrics.items()}
        return joined(replace(out, sum=corrected * out.sum), replace(term, metrics=named), base)
