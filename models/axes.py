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


def axis_of_each(theirs: Any, rope: Any, num_frequencies: int) -> tuple[int, ...] | None:
    """The axis of every frequency. It is tried: a position of one on one axis turns the frequencies
    of that axis alone. `theirs`: the rotary embedding of the model; `rope`: the parameters of its
    configuration. None where positions have no axes, or not one for each frequency."""
    section: Sequence[int] | None = (rope or {}).get("mrope_section")
    if section is None:
        return None
    found = [-1] * num_frequencies
    for axis in range(3):
        position_311 = torch.zeros(3, 1, 1, dtype=torch.long, device=theirs.inv_freq.device)
        position_311[axis] = 1
        sin = theirs(torch.zeros(1, device=position_311.device), position_311)[1]
        if sin.dim() != 3:  # releases in which each layer puts the axes together
            return _sections(section, num_frequencies)
        for at in sin[0, 0, :num_frequencies].nonzero()[:, 0].tolist():
            found[at] = axis
    return None if min(found) < 0 else tuple(found)


def _sections(section: Sequence[int], num_frequencies: int) -> tuple[int, ...] | None:
    """One axis behind another, as in Qwen2-VL."""
    axis = tuple(axis for axis, count in enumerate(section) for _ in range(count))
    return axis if len(axis) == num_frequencies else None


def axes_of_section(section: Sequence[int], is_interleaved: bool) -> tuple[int, ...]:
    """The axis of every frequency by `mrope_section`, as configurations have it: one axis behind
    another (Qwen2-VL), or interleaved (`mrope_interleaved`, Qwen3-VL): of every three frequencies
    one is of height and one of width, as long as their shares last, and all others are of time."""
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axis = [0] * sum(section)
    for own in (1, 2):
        for at in range(own, min(3 * section[own], len(axis)), 3):
            axis[at] = own
    return tuple(axis)


def section_of(axis: Sequence[int]) -> tuple[list[int], bool] | None:
    """`mrope_section`, and whether it is interleaved; None where neither says these axes."""
    section = [sum(own == each for own in axis) for each in range(3)]
    for is_interleaved in (False, True):
        if axes_of_section(section, is_interleaved) == tuple(axis):
            return section, is_interleaved
    return None
