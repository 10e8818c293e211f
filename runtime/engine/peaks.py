"""The one look that a round takes at the target's numbers.

Whether logits are numbers shows in the largest one behind every fed token: NaN, +inf, or -inf where
nothing is left. So one pass finds it, and it reaches the host with what the commit reads anyway.
Where bias, penalties or a grammar change the logits, the token that is drawn is looked at once more
behind them: with everything banned there is none.
Letters: B rows, P path, T fed tokens, V target vocabulary, X any axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import BannedError
from specctl.core.tree import DraftTree
from specctl.models.not_finite import is_bad
from specctl.runtime.verify import Verdict


def nothing_left(rows: tuple[int, ...]) -> BannedError:
    """The error for requests in which no token may come next."""
    return BannedError(
        "no token may come next",
        found="a bias, banned words, processors or a grammar that leave nothing of the vocabulary",
        expected="at least one token that is allowed",
        do="ban fewer tokens, or allow an end of text",
        rows=rows,
    )


class BadRows(Exception):
    """Places of rows that got nothing in a round: their logits are no `numbers`, or everything is
    `banned` that could come next. Nothing was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.banned: list[int] = []


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of float32 `logits_BTV`: `fed_BT` the largest, 0 at padding of a tree; `left_BT` of the
    processed ones, None where nothing changed them."""

    logits_BTV: Tensor
    fed_BT: Tensor
    left_BT: Tensor | None = None

    @classmethod
    def of(cls, logits_BTV: Tensor, processed_BTV: Tensor, tree: DraftTree) -> Peaks:
        fed_BT = logits_BTV.amax(-1)
        if not tree.is_chain:  # there padding stands behind what the host knows to be drafted
            fed_BT = fed_BT.masked_fill(~tree.fed_valid_BT(), 0.0)
        is_changed = processed_BTV is not logits_BTV
        return cls(logits_BTV, fed_BT, processed_BTV.amax(-1) if is_changed else None)

    def without_voids(self, processed_BTV: Tensor) -> Tensor:
        """The processed logits, anything at all in place of rows in which all is banned: the text
        ends in front of them, and NaN there would reach the tests of other nodes."""
        if self.left_BT is None:
            return processed_BTV
        return processed_BTV.masked_fill((self.left_BT == -torch.inf)[:, :, None], 0.0)

    def with_unread(self) -> Peaks:
        """With a last fed token that the target has not read yet."""
        left_BT = None if self.left_BT is None else F.pad(self.left_BT, (0, 1))
        return Peaks(self.logits_BTV, self.fed_BT, left_BT)

    def first_bad(self, row: int) -> int:
        """The fed index behind which that row's logits are bad first."""
        return int(is_bad(self.logits_BTV[row]).int().argmax())

    def read_with(self, packed_BX: Tensor, verdict: Verdict) -> HostPeaks:
        """`packed_BX` and the peaks on the host, in one transfer."""
        peak_BT = self.fed_BT
        if self.left_BT is not None:
            end_B1 = verdict.path_BP.gather(1, verdict.num_accepted_B[:, None])
            peak_BT = torch.cat([peak_BT, self.left_BT.gather(1, end_B1)], dim=1)
        is_changed = self.left_BT is not None
        if is_on_host(packed_BX):
            return HostPeaks(packed_BX.tolist(), peak_BT.tolist(), is_changed)
        both = torch.cat([packed_BX, peak_BT.view(torch.int32)], dim=1).cpu().numpy()
        width = packed_BX.shape[1]
        peaks = both[:, width:].astype(np.int32).view(np.float32)
        return HostPeaks(both[:, :width].tolist(), peaks.tolist(), is_changed)


def is_on_host(tensor: Tensor) -> bool:
    """Whether to read it costs nothing."""
    return tensor.device.type == "cpu"


class HostPeaks(NamedTuple):
    """What a round decided, `packed`, and by row the largest logit behind every fed token, padding
    among them; if it `is_changed` the last is that of the processed logits behind the last accepted
    token."""

    packed: list[list[int]]
    peaks: list[list[float]]
    is_changed: bool

    def is_bad(self, row: int, num_fed: int) -> bool:
        """Whether the target's own logits behind the first `num_fed` are no numbers."""
        return not all(map(math.isfinite, self.peaks[row][:num_fed]))

    def is_banned(self, row: int) -> bool:
        """Whether nothing may follow."""
        return self.is_changed and not math.isfinite(self.peaks[row][-1])
