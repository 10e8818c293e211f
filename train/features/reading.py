"""The target as it is read for features: computed in float32 on CPUs that only emulate bfloat16.

There a product of bfloat16 takes two to three times as long as one of float32 (tiny, 8 rows of 288,
one core of an AVX512 machine without AVX512-BF16: 1.36 s a batch against 0.69). The weights are
those of the bfloat16 target, so that its rounding between layers is all that differs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specctl.models.fast_llama import FastLlama, LlamaModel
from specctl.runtime.target.device import has_fast_bf16
from specctl.runtime.target.target import Target

MOST_PARAMETERS = 500_000_000  # whose copy, 2 GB, is worth its memory


def reading_target(target: Target) -> Target:
    """The target to capture features of: itself, or a float32 copy where that is faster."""
    lm = target.lm
    is_emulated = target.device.type == "cpu" and lm.dtype == torch.bfloat16 and not has_fast_bf16()
    if not is_emulated or not isinstance(lm, FastLlama):
        return target
    if sum(parameter.numel() for parameter in lm.module.parameters()) > MOST_PARAMETERS:
        return target
    old = lm.module
    wide = LlamaModel(old.shape, old.rotary.inv_freq, old.rotary.scale)
    wide.load_state_dict(old.state_dict())
    return replace(target, lm=FastLlama(wide.eval().requires_grad_(False), lm.spec))
