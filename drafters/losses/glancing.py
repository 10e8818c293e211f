"""Glancing: a second training pass that is shown some of what the first one got wrong.

A drafter that says several tokens at once guesses each without the others. Glancing (GLAT, arXiv
2008.07905, sec. 3.1) teaches it how they hang together: the first pass, without gradient, counts
the wrong tokens; the second one finds the truth in the place of some inputs, `share` times as many
as were wrong, and learns the rest. The share falls while training goes on, and so does the count.
Coupled sequential glancing (Falcon, arXiv 2412.12639) shows tokens and features together, always
from the beginning of a block on. Letters: B rows, S sequence, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.drafters.losses.align import shifted


@dataclass(frozen=True, slots=True)
class Glance:
    """At the last row of each block: how many of its rows are shown what they are to predict."""

    shown_BS: Tensor
    stride: int

    def shows(self, index: int) -> Tensor:
        """Bool [B, S], at the last rows of blocks: row `index` of the block is shown."""
        return self.shown_BS > index

    def rows(self, is_end_BS: Tensor) -> Tensor:
        """Bool [B, S]: the rows to be replaced in the blocks that end there."""
        shown_BS = torch.zeros_like(is_end_BS)
        for index in range(self.stride - 1):
            here_BS = (self.shows(index) & is_end_BS).long()
            shown_BS |= shifted(here_BS, self.stride - 1 - index) > 0
        return shown_BS


def choose(wrong_BS: Tensor, is_end_BS: Tensor, stride: int, share: float) -> Glance:
    """Random blocks, `share` times as many as there are wrong tokens (counted at the last rows of
    blocks); of each, one to all rows but the last are shown."""
    num_B1 = (share * (wrong_BS * is_end_BS).sum(1, keepdim=True)).long()
    chance_BS = torch.rand(is_end_BS.shape, device=is_end_BS.device) + is_end_BS
    place_BS = chance_BS.argsort(1, descending=True).argsort(1)
    length_BS = torch.randint(1, stride, is_end_BS.shape, device=is_end_BS.device)
    return Glance(length_BS * (is_end_BS & (place_BS < num_B1)), stride)


def ahead(state_BSD: Tensor, steps: int) -> Tensor:
    """[B, S, D]: entry t holds the state at t + steps, zero where the row has ended."""
    return F.pad(state_BSD[:, steps:], (0, 0, 0, min(steps, state_BSD.shape[1])))


def behind(state_BSD: Tensor, position_BS: Tensor, steps: int) -> Tensor:
    """[B, S, D]: entry t holds the state at t - steps, zero before its document began."""
    if steps == 0:
        return state_BSD
    back_BSD = F.pad(state_BSD, (0, 0, steps, 0))[:, : state_BSD.shape[1]]
    return back_BSD * (position_BS >= steps)[:, :, None]
