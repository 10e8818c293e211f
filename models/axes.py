"""Rotary positions with several axes (M-RoPE: Qwen2-VL, arXiv 2409.12191, section 2.1).

Every frequency of the rotation belongs to one axis: time, height or width. A token of text has the
same position in all of them, and its rotation is the ordinary one; only the tokens of an image
need what is made here, while a prompt is read.
Letters: B rows, E head width, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.models.llama.llama import Rotary


@dataclass(frozen=True, slots=True)
class RotaryAxes:
    """`axis`: which of the three axes turns each frequency, [E / 2]."""

    rotary: Rotary
    axis: tuple[int, ...]

    def at(self, position_3BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [B, T, 1, E], as `Rotary.at` gives them."""
        inv_freq = self.rotary.inv_freq.to(position_3BT.device)
        own = position_3BT[list(self.axis)].permute(1, 2, 0)  # of each frequency
        angle = own.float() * inv_freq
        cos, sin = angle.cos() * self.rotary.scale, angle.sin() * self.rotary.scale
        both = torch.cat([cos, cos, -sin, sin], dim=-1).to(dtype)[:, :, None]
        cos, sin = both.chunk(2, dim=-1)
        return cos, sin


def axis_of_each(rope: Any, num_frequencies: int) -> tuple[int, ...] | None:
    """The axis of every frequency by a configuration's rope parameters; None where these have no
    sections that cover all frequencies, or one behind another in an order not known here."""
    section: Sequence[int] | None = (rope or {}).get("mrope_section")
    if section is None or len(section) != 3 or sum(section) != num_frequencies:
        return None
    if not rope.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axis = [0] * num_frequencies  # Qwen3-VL: time, height, width in turn, and time at the end
    for which in (1, 2):
        axis[which : 3 * section[which] : 3] = [which] * len(range(which, 3 * section[which], 3))
    return tuple(axis)
