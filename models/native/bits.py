"""Matrices of 8 or 4 bits as the compiled step reads them (bits.h).

A group of inputs of an output has one scale: 64 inputs in 8 bits, 32 in 4. In 8 bits it is the
largest of the weights / 127. In 4 bits, from -8 to 7, it is the one of `CANDIDATES` with the least
squared error; it may be negative, so that the largest weight can be -8 of them. Sixteen outputs and
a group are a record: for every four inputs, 16 times the four weights of an output, plus 128 (of 4
bits plus 8, and the next four inputs in the upper halves of the same bytes); then the 16 scales.
Letters: I input width, O output width, X any axes.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.models.copies import Copies

SIDE, FOUR = 16, 4
GROUPS = {8: 64, 4: 32}  # inputs that share a scale, by bits of a weight
CANDIDATES = (7.0, 7.5, 8.0, 8.5, 9.0, 9.5, 10.0)  # scales of 4 bits: largest weight / -this


def packed(weight_OI: Tensor, bits: int) -> Tensor:
    """uint8 [records, 1,088 of 8 bits or 320 of 4] of a matrix; outputs and inputs that fill a
    record up are zero. Whoever asks for the same matrix gets the same copy."""
    return _copies[bits].of(weight_OI)


def rounded(weight_OI: Tensor, bits: int) -> Tensor:
    """The matrix that the bits stand for, float32 [O, I]."""
    whole_OX, scale_OX = _whole(weight_OI.detach(), bits)
    return (whole_OX * scale_OX).flatten(1)[:, : weight_OI.shape[1]]


def rounded_inputs(x_XI: Tensor, bits: int) -> Tensor:
    """What the step makes of the inputs of such a matrix: 8 bits in groups of its size."""
    whole_XX, scale_XX = _in_8(_grouped(x_XI, GROUPS[bits]))
    return (whole_XX * scale_XX).flatten(1)[:, : x_XI.shape[1]]


def _packed(weight_OI: Tensor, bits: int) -> Tensor:
    group = GROUPS[bits]
    filled = F.pad(weight_OI.detach(), (0, 0, 0, -len(weight_OI) % SIDE))
    whole_OX, scale_OX = _whole(filled, bits)
    groups = whole_OX.shape[1]
    raised = (whole_OX.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    lines = raised.view(-1, SIDE, groups, group // FOUR, FOUR).permute(0, 2, 3, 1, 4)
    if bits == 4:
        lines = lines[:, :, ::2] | lines[:, :, 1::2] << 4
    scales = scale_OX.view(-1, SIDE, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([lines.flatten(2), scales], dim=-1).flatten(0, 1).contiguous()


def _whole(weight_OI: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers [O, groups, inputs], and the scales [O, groups, 1]."""
    parts_OX = _grouped(weight_OI, GROUPS[bits])
    return _in_8(parts_OX) if bits == 8 else _in_4(parts_OX)


def _grouped(weight_OI: Tensor, group: int) -> Tensor:
    filled = F.pad(weight_OI.float(), (0, -weight_OI.shape[1] % group))
    return filled.view(len(weight_OI), -1, group)


def _in_8(parts_OX: Tensor) -> tuple[Tensor, Tensor]:
    scale_OX = parts_OX.abs().amax(-1, keepdim=True) / 127
    return _divided(parts_OX, scale_OX).round(), scale_OX


def _in_4(parts_OX: Tensor) -> tuple[Tensor, Tensor]:
    largest_OX = parts_OX.gather(-1, parts_OX.abs().argmax(-1, keepdim=True))
    scale_OX = torch.zeros_like(largest_OX)
    least_OX = torch.full_like(largest_OX, torch.inf)
    for steps in CANDIDATES:
        tried_OX = largest_OX / -steps
        off_OX = _nearest(parts_OX, tried_OX).mul_(tried_OX).sub_(parts_OX).square_()
        error_OX = off_OX.sum(-1, keepdim=True)
        scale_OX = torch.where(error_OX < least_OX, tried_OX, scale_OX)
        least_OX = torch.minimum(error_OX, least_OX)
    return _nearest(parts_OX, scale_OX), scale_OX


def _nearest(parts_OX: Tensor, scale_OX: Tensor) -> Tensor:
    return _divided(parts_OX, scale_OX).round_().clamp_(-8, 7)


def _divided(parts_OX: Tensor, scale_OX: Tensor) -> Tensor:
    return torch.where(scale_OX != 0, parts_OX / scale_OX, 0.0)


_copies: dict[int, Copies[Tensor, Tensor]] = {
    bits: Copies(partial(_packed, bits=bits)) for bits in GROUPS
}
