"""VisualDrafter: a drafter on the target's features that reads images as images.

In EAGLE's frame the row of token t + 1 mixes that token's embedding with the target's state before
it. The embedding of an image's placeholder says nothing, so here the row of a placeholder *is* a
vector of the image (MSD, arXiv 2505.14260, section 3: text and visual tokens decoupled): by default
what the target's vision tower and projector put at that position, which is tap 0 there. It goes
into the layer as it is, and no row of an image is trained. Without images all is EAGLE's.
Letters: B rows, D hidden width, S sequence, T fed tokens, X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Space, StepState
from specctl.drafters.frames.feature_drafter import FeatureDrafter, TrunkState
from specctl.drafters.losses.align import shifted
from specctl.drafters.states.tree_layout import Fed

VISUAL = 0  # the tap that holds, at placeholders, what stands for the image


class VisualDrafter(FeatureDrafter):
    """Rows of images in training. `decouples` False: they are mixed like those of text."""

    @property
    def decouples(self) -> bool:
        return True

    def open(self, space: Space) -> StepState:
        return VisualState(self, space) if self.decouples else TrunkState(self, space)

    def shown(self, batch: TrainBatch) -> TrainBatch:
        """The batch as the drafter reads it."""
        return batch

    def mixed(
        self, batch: TrainBatch, ahead: int, state_BSD: Tensor, first_BSD: Tensor | None = None
    ) -> Tensor:
        x_BSD = super().mixed(batch, ahead, state_BSD, first_BSD)
        if batch.image_BS is None or not self.decouples:
            return x_BSD
        is_visual_BS = batch.own(shifted(batch.image_BS.long(), ahead) > 0)
        steps = min(ahead, batch.ids_BS.shape[1])
        visual_BSD = F.pad(batch.taps[VISUAL][:, steps:], (0, 0, 0, steps))
        return torch.where(is_visual_BS[:, :, None], batch.own(visual_BSD).to(x_BSD), x_BSD)

    def loss(self, batch: TrainBatch) -> LossOut:
        if batch.image_BS is not None:
            batch = replace(batch, loss_mask_BS=batch.loss_mask_BS & ~batch.image_BS)
        return super().loss(self.shown(batch))


class VisualState(TrunkState):
    """Memory of one engine. The state beside a placeholder is its visual row. As that row belongs
    to the *next* token, the newest position of a prompt that is read in parts waits for the next
    part."""

    def __init__(self, drafter: FeatureDrafter, space: Space) -> None:
        super().__init__(drafter, space)
        self._places = frozenset(space.unsaid)
        self._place_X = torch.tensor(space.unsaid, dtype=torch.long, device=self.device)
        self._waiting: dict[int, dict[int, Tensor]] = {}  # taps at the newest position of a slot

    def mixed(self, fed: Fed) -> Tensor:
        x_BTD = super().mixed(fed)
        if not self._places:
            return x_BTD
        is_visual_BT = (fed.ids_BT[:, :, None] == self._place_X).any(-1)
        return torch.where(is_visual_BT[:, :, None], fed.state_BTD, x_BTD)

    def prefill(
        self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor], first: int, last: int
    ) -> None:
        if not self._places or first == last:
            super().prefill(slot, tokens, taps, first, last)
            return
        if first > 0:
            before = self._waiting[slot]
            taps, first = {tap: torch.cat([before[tap], taps[tap]]) for tap in taps}, first - 1
        self._waiting[slot] = {tap: value[-1:].clone() for tap, value in taps.items()}
        shown = {tap: value[:-1] for tap, value in self._shown(tokens, taps, first).items()}
        super().prefill(slot, tokens, shown, first, last - 1)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self._waiting.pop(slot, None)
        super().start(slot, tokens, self._shown(tokens, taps, 0))

    def _shown(
        self, tokens: Sequence[int], taps: Mapping[int, Tensor], first: int
    ) -> Mapping[int, Tensor]:
        """Taps from position `first` on; where an image comes next, with its visual row in the
        place of the state."""
        tap = self.drafter.tap
        if not self._places or tap not in taps:
            return taps
        next_at = range(first + 1, first + len(taps[tap]))
        before = [at - first - 1 for at in next_at if tokens[at] in self._places]
        if not before:
            return taps
        state_TD = taps[tap].clone()
        state_TD[before] = taps[VISUAL][[at + 1 for at in before]].to(state_TD)
        return {**taps, tap: state_TD}
