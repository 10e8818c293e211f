"""Rotary positions of a drafter by the axes of the target's images (M-RoPE: Qwen2-VL, arXiv
2409.12191, section 2.1).

A target with M-RoPE counts time, height and width apart, and text behind an image goes on from a
smaller position than its index. A drafter that follows it (option `mrope`: the axis that turns each
frequency, 0 time, 1 height, 2 width) rotates every row by the three positions of its index. Text
has one position in all axes, so that without images the rotation is the plain one, bit for bit.
Letters: B rows, E head width, S sequence, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError

NUM_AXES = 3


def axes_of(options: Any) -> tuple[int, ...] | None:
    """The axis of each frequency; None where a drafter's positions are plain."""
    return getattr(options, "mrope", None) or None


def checked_axes(options: Any, head_dim: int) -> tuple[int, ...] | None:
    """`axes_of`, one of three axes for each frequency of that width; else a RecipeError."""
    axis = axes_of(options)
    if axis is None:
        return None
    if len(axis) != head_dim // 2 or not {*axis} <= {*range(NUM_AXES)}:
        raise RecipeError(
            "mrope does not name an axis for each frequency of the drafter's positions",
            where="drafter.options.mrope",
            found=f"{len(axis)} numbers, from {min(axis)} to {max(axis)}",
            expected=f"{head_dim // 2} of 0 (time), 1 (height) and 2 (width)",
            do="leave it out: the target's own axes are taken where data hold images; or "
            "--set 'drafter.options.mrope=[]' for plain positions",
        )
    return axis


def by_axes(rope_X2E: Tensor, axis: Sequence[int]) -> Tensor:
    """[..., 2, E]: of rotations [3, ..., 2, E] of each axis, that of every frequency's own."""
    axis_E = torch.tensor([*axis, *axis], device=rope_X2E.device)
    at_E = torch.arange(len(axis_E), device=rope_X2E.device)
    return rope_X2E[axis_E, ..., at_E].movedim(0, -1)


def rope_ahead(
    batch: TrainBatch,
    ahead: int,
    rope: Callable[[Tensor], Tensor],
    axis: Sequence[int] | None,
) -> Tensor:
    """[B, S, 2, E]: the rotations of rows that stand so many positions further on. Of an index
    behind its document no row is trained."""
    if axis is None or batch.position_BS3 is None:
        return rope(batch.own(batch.position_BS) + ahead)
    position_BS3 = F.pad(batch.position_BS3[:, ahead:], (0, 0, 0, ahead))
    return by_axes(rope(batch.own(position_BS3).movedim(-1, 0)), axis)
