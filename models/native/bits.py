"""Matrices of 8 or 4 bits as the compiled step reads them (bits.h).

A group is 64 inputs of an output. In 8 bits it has one scale, the largest of its weights / 127. In
4 bits it has a scale and a least value, and a weight is least + 0 .. 15 times the scale: of spans
about the middle that are as wide as the group's or somewhat less (`SPANS`), the one with the least
squared error. Sixteen outputs and a group are a record: for every four inputs, 16 times the four
weights of an output, of 8 bits plus 128 (of 4 bits the next four inputs in the upper halves of the
same bytes); then 16 scales, and of 4 bits 16 least values.
Letters: I input width, O output width, X any axes.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.models.weights.copies import Copies

GROUP, SIDE, FOUR = 64, 16, 4
SPANS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
TINY = 1e-30  # a scale of a group whose weights are equal


def packed(weight_OI: Tensor, bits: int) -> Tensor:
    """uint8 [records, 1,088 of 8 bits or 640 of 4] of a matrix; outputs and inputs that fill a
    record up are zero. A second call with the same matrix gets the same copy."""
    return _copies[bits].of(weight_OI)


def _packed(weight_OI: Tensor, bits: int) -> Tensor:
    whole_OX, *steps = _whole(F.pad(weight_OI.detach(), (0, 0, 0, -len(weight_OI) % SIDE)), bits)
    groups = whole_OX.shape[1]
    raised = (whole_OX.to(torch.int16) + (128 if bits == 8 else 0)).to(torch.uint8)
    lines = raised.view(-1, SIDE, groups, GROUP // FOUR, FOUR).permute(0, 2, 3, 1, 4)
    if bits == 4:
        lines = lines[:, :, ::2] | lines[:, :, 1::2] << 4
    sides = [step_OX.view(-1, SIDE, groups).transpose(1, 2).contiguous() for step_OX in steps]
    record = [lines.flatten(2), *(side.view(torch.uint8) for side in sides)]
    return torch.cat(record, dim=-1).flatten(0, 1).contiguous()


def rounded(weight_OI: Tensor, bits: int) -> Tensor:
    """The matrix that the bits stand for, float32 [O, I]."""
    whole_OX, scale_OX, *least = _whole(weight_OI.detach(), bits)
    wide_OX = whole_OX * scale_OX + sum(least)
    return wide_OX.flatten(1)[:, : weight_OI.shape[1]]


def _whole(weight_OI: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Whole numbers [O, groups, 64], the scales [O, groups, 1] and in 4 bits the least values."""
    filled = F.pad(weight_OI.float(), (0, -weight_OI.shape[1] % GROUP))
    parts_OX = filled.view(len(weight_OI), -1, GROUP)
    return _in_8(parts_OX) if bits == 8 else _in_4(parts_OX)


def _in_8(parts_OX: Tensor) -> tuple[Tensor, Tensor]:
    scale_OX = parts_OX.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale_OX > 0, parts_OX / scale_OX, 0.0).round(), scale_OX


def _in_4(parts_OX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low_OX, high_OX = parts_OX.aminmax(dim=-1, keepdim=True)
    scale_OX = least_OX = torch.zeros_like(low_OX)
    error_OX = torch.full_like(low_OX, torch.inf)
    for span in SPANS:
        half_OX = (high_OX - low_OX) / 2 * span
        tried_OX, from_OX = (half_OX * 2 / 15).clamp(min=TINY), (low_OX + high_OX) / 2 - half_OX
        off_OX = _nearest(parts_OX, tried_OX, from_OX).mul_(tried_OX).add_(from_OX).sub_(parts_OX)
        found_OX = off_OX.square_().sum(-1, keepdim=True)
        is_better_OX = found_OX < error_OX
        scale_OX = torch.where(is_better_OX, tried_OX, scale_OX)
        least_OX = torch.where(is_better_OX, from_OX, least_OX)
        error_OX = torch.minimum(found_OX, error_OX)
    return _nearest(parts_OX, scale_OX, least_OX), scale_OX, least_OX


def _nearest(parts_OX: Tensor, scale_OX: Tensor, least_OX: Tensor) -> Tensor:
    return (parts_OX - least_OX).div_(scale_OX).round_().clamp_(0, 15)


_copies: dict[int, Copies[Tensor, Tensor]] = {
    bits: Copies(partial(_packed, bits=bits)) for bits in (8, 4)
}
