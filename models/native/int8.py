"""Matrices of 8 bits as the compiled step reads them (int8.h).

A group of 64 inputs of an output has one scale, the largest of its weights / 127. Sixteen outputs
and a group are a record: for every four inputs, 16 times the four weights of an output, plus 128;
then the 16 scales.
Letters: I input width, O output width, X any axes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.models.copies import Copies

GROUP, SIDE, FOUR = 64, 16, 4


def packed(weight_OI: Tensor) -> Tensor:
    """uint8 [records, 1,088] of a matrix; outputs and inputs that fill a record up are zero.
    Whoever asks for the same matrix gets the same copy."""
    return _copies.of(weight_OI)


def _packed(weight_OI: Tensor) -> Tensor:
    whole_OX, scale_OX = _whole(F.pad(weight_OI.detach(), (0, 0, 0, -len(weight_OI) % SIDE)))
    groups = whole_OX.shape[1]
    bits = (whole_OX.to(torch.int16) + 128).to(torch.uint8)
    weights = bits.view(-1, SIDE, groups, GROUP // FOUR, FOUR).permute(0, 2, 3, 1, 4).flatten(2)
    scales = scale_OX.view(-1, SIDE, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([weights, scales], dim=-1).flatten(0, 1).contiguous()


def rounded(weight_OI: Tensor) -> Tensor:
    """The matrix that the 8 bits stand for, float32 [O, I]."""
    whole_OX, scale_OX = _whole(weight_OI.detach())
    return (whole_OX * scale_OX).flatten(1)[:, : weight_OI.shape[1]]


def _whole(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [O, groups, 64] from -127 to 127, and the scales [O, groups, 1]."""
    filled = F.pad(weight_OI.float(), (0, -weight_OI.shape[1] % GROUP))
    parts_OX = filled.view(len(weight_OI), -1, GROUP)
    scale_OX = parts_OX.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale_OX > 0, parts_OX / scale_OX, 0.0).round(), scale_OX


_copies: Copies[Tensor, Tensor] = Copies(_packed)
