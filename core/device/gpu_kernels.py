"""Kernels written in Triton: whether they can be built here, and on which GPU they start."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """It is installed and knows this GPU, and there is a compiler of C, in which it writes what
    launches its kernels."""
    from torch.utils import _triton

    return bool(_triton.has_triton()) and any(map(shutil.which, ("cc", "gcc", "clang")))


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Where a kernel starts that reads `x`: Triton starts them on the current GPU."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
