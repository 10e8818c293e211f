"""Freed memory stays with the process, where tensors of the same sizes come and go.

glibc gives large blocks back to the system as soon as they are free, and every page that it takes
again is zeroed by the kernel when it is first touched. A step of training on a CPU asks for the
same blocks as the step before: one of recipe dflash met 4,200 to 6,800 such pages and took 1.05,
1.07 and 1.26 s, kept 1.03, 1.01 and 1.20 s (three pairs of runs, one thread, a virtual machine).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt
MOST = 2**31 - 1
OWN = 2**25  # the largest block that glibc by itself learns to keep
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@contextmanager
def kept_memory(device: torch.device) -> Iterator[None]:
    """Inside, memory is kept, if the device is a CPU and nobody has set an allocator up. In the end
    it is given back."""
    glibc = _glibc() if device.type == "cpu" and not any(map(os.environ.get, SETTINGS)) else None
    if glibc is None:
        yield
        return
    _set(glibc, MOST, MOST)
    try:
        yield
    finally:
        _set(glibc, OWN, 2 * OWN)
        glibc.malloc_trim(0)


def _set(glibc: ctypes.CDLL, largest: int, most: int) -> None:
    """Blocks up to `largest` are kept, and of what is free `most` bytes."""
    if not glibc.mallopt(MMAP_THRESHOLD, largest):  # older ones keep no larger blocks
        glibc.mallopt(MMAP_THRESHOLD, OWN)
    glibc.mallopt(TRIM_THRESHOLD, most)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None)
    return found if hasattr(found, "gnu_get_libc_version") else None
