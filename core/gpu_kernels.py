"""Whether kernels written in Triton can be built on this machine."""

from __future__ import annotations

import shutil
from functools import cache


@cache
def has_triton() -> bool:
    """It is installed and knows this GPU, and there is a compiler of C, in which it writes what
    launches its kernels."""
    from torch.utils import _triton

    return bool(_triton.has_triton()) and any(map(shutil.which, ("cc", "gcc", "clang")))
