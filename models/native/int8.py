"""Matrices of 8 bits as the compiled step reads them (int8.h).

A group of 64 inputs of an output has one scale, the largest of its weights / 127. Sixteen outputs
and a group are a record: for every four inputs, 16 times the four weights of an output, plus 128;
then the 16 scales.
Letters: F four inputs, G groups, K inputs, O outputs, S sixteen outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP, SIDE, FOUR = 64, 16, 4


def packed(weight_OK: Tensor) -> Tensor:
    """uint8 [records, 1,088] of a matrix; outputs and inputs that fill a record up are zero."""
    outputs, K = weight_OK.shape
    whole = F.pad(weight_OK.detach().float(), (0, -K % GROUP, 0, -outputs % SIDE))
    parts_OGK = whole.view(whole.shape[0], -1, GROUP)
    scale_OG1 = parts_OGK.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(scale_OG1 > 0, parts_OGK / scale_OG1, 0.0).round().to(torch.int16) + 128
    sixteen = rounded.to(torch.uint8).view(-1, SIDE, parts_OGK.shape[1], GROUP // FOUR, FOUR)
    weights = sixteen.permute(0, 2, 3, 1, 4).flatten(2)  # [O / 16, G, 1,024]
    scales = scale_OG1.view(-1, SIDE, parts_OGK.shape[1]).transpose(1, 2).contiguous()
    return torch.cat([weights, scales.view(torch.uint8)], dim=-1).flatten(0, 1).contiguous()


def rounded(weight_OK: Tensor) -> Tensor:
    """The matrix that the 8 bits stand for, float32 [O, K]."""
    outputs, K = weight_OK.shape
    parts_OGK = F.pad(weight_OK.detach().float(), (0, -K % GROUP)).view(outputs, -1, GROUP)
    scale_OG1 = parts_OGK.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(scale_OG1 > 0, parts_OGK / scale_OG1, 0.0).round() * scale_OG1
    return whole.flatten(1)[:, :K]
