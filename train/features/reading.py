"""The target as it is read for features: in the precision whose products are fast here.

A bfloat16 target is read in float32 on CPUs that only emulate bfloat16. There a product of bfloat16
takes two to three times as long (tiny, 8 rows of 288, one core of an AVX512 machine without
AVX512-BF16: 1.36 s a batch against 0.69). A float32 target, such as a widened GGUF file, is read in
bfloat16 by a run of that precision on CPUs that have it, and its features are kept in bfloat16
anyway. A float32 copy has the target's own weights, so that rounding between layers is all that
differs; those of a bfloat16 copy are rounded, too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specctl.models.llama.fast_llama import FastLlama, LlamaModel
from specctl.recipes.schema import TrainPart
from specctl.runtime.target.placement.device import has_fast_bf16
from specctl.runtime.target.target import Target

MOST_PARAMETERS = 500_000_000  # whose copy, 1 or 2 GB, is worth its memory


def reading_target(target: Target, train: TrainPart) -> Target:
    """The target to capture features of: itself, or a copy in another precision where that is
    faster. A target that learns is always read itself."""
    lm = target.lm
    dtype = _reading_dtype(target, train)
    if dtype is None or not isinstance(lm, FastLlama) or lm.bits is not None:
        return target
    if sum(parameter.numel() for parameter in lm.module.parameters()) > MOST_PARAMETERS:
        return target
    old = lm.module
    copied = LlamaModel(old.shape, old.rotary.inv_freq, old.rotary.scale)
    copied.load_state_dict(old.state_dict())
    copied = copied.to(dtype).eval().requires_grad_(False)
    return replace(target, lm=FastLlama(copied, lm.spec))


def _reading_dtype(target: Target, train: TrainPart) -> torch.dtype | None:
    """Another dtype than the target's, where that is faster."""
    if target.device.type != "cpu" or train.joint is not None:
        return None
    if target.dtype == torch.bfloat16 and not has_fast_bf16():
        return torch.float32
    if target.dtype == torch.float32 and train.precision == "bf16" and has_fast_bf16():
        return torch.bfloat16
    return None
