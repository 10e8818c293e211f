"""Matrices in 4 bits: groups of inputs with a scale and an offset each, two weights a byte.

A weight is (code - 8) * scale + middle, code = 0 .. 15: the nearest of sixteen values between the
smallest and the largest of its group. In bfloat16 on a CPU the product is PyTorch's own kernel,
which reads the 4 bits; elsewhere (it is a reference loop for float32) the matrix is written out for
every product. Microseconds of one row, the best of 60, one core of an AVX512 machine under load,
torch 2.13, groups of 64, bfloat16; "packed" is oneDNN's layout (kernels.py):

    [1280, 256]  linear 117  packed   86  4 bits   58
    [6144, 256]  linear 402  packed  257  4 bits  196
    [5632, 1024] linear 1861 packed  967  4 bits  706
    [8192, 2048] linear 4934 packed 3657  4 bits 1539

Letters: G groups, I input width, O output width, X any axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 16  # outputs that PyTorch's kernel reads together
_OPS = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
_has_kernel = all(hasattr(torch.ops.aten, name) for name in _OPS)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """`codes` [O, I / 2] uint8: in PyTorch's order if `is_packed`, else the even inputs below;
    `steps` [G, O, 2]: scale and middle of each group."""

    codes: Tensor
    steps: Tensor
    group: int
    is_packed: bool

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.steps.nbytes

    def written_out(self) -> Tensor:
        """[O, I] in the precision of `steps`; of codes in our own order."""
        assert not self.is_packed, "PyTorch's order is its kernel's own matter"
        codes_OI = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1)
        steps_OG2 = self.steps.transpose(0, 1)
        codes_OGX = codes_OI.view(len(codes_OI), -1, self.group).to(self.steps.dtype) - 8
        return (codes_OGX * steps_OG2[..., :1] + steps_OG2[..., 1:]).flatten(1)


@torch.no_grad()
def in_int4(weight_OI: Tensor, group: int) -> Int4Weight:
    """A matrix in 4 bits. The group is halved until it divides the inputs."""
    while weight_OI.shape[1] % group:
        group //= 2
    weight_OGX = weight_OI.detach().float().reshape(len(weight_OI), -1, group)
    low_OG1, high_OG1 = weight_OGX.amin(-1, keepdim=True), weight_OGX.amax(-1, keepdim=True)
    scale_OG1 = ((high_OG1 - low_OG1) / 15).clamp(min=1e-6).to(weight_OI.dtype)
    middle_OG1 = (low_OG1 + 8 * scale_OG1.float()).to(weight_OI.dtype)
    codes_OGX = (weight_OGX - middle_OG1.float()) / scale_OG1.float() + 8
    codes_OI = codes_OGX.round().clamp(0, 15).flatten(1).to(torch.uint8)
    steps = torch.cat([scale_OG1, middle_OG1], -1).transpose(0, 1).contiguous()
    if _has_kernel and _kernel_reads(weight_OI, group):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OI.int(), 1)
        return Int4Weight(packed, steps, group, is_packed=True)
    return Int4Weight(codes_OI[:, ::2] | codes_OI[:, 1::2] << 4, steps, group, is_packed=False)


def _kernel_reads(weight_OI: Tensor, group: int) -> bool:
    is_bf16 = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.bfloat16
    return is_bf16 and group in (32, 64, 128, 256) and weight_OI.shape[0] % SIDE == 0


def linear_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    if not weight.is_packed:
        return F.linear(x, weight.written_out(), bias)
    kernel: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out: Tensor = kernel(flat, weight.codes, weight.group, weight.steps).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias
