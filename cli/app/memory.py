"""How much memory this process has needed at most."""

from __future__ import annotations

import sys
from typing import Any


def peak_memory() -> dict[str, int]:
    """Bytes: `process` (resident), and `gpu` where torch has used one."""
    found = {}
    try:
        import resource
    except ImportError:  # not on every system
        pass
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        found["process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["gpu"] = max(
            torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())
        )
    return found


def peak_text() -> str:
    """`peak memory 812.0 MiB`, with the GPU's where there is one; empty if unknown."""
    parts = [
        size_text(count) + (" on the GPU" if name == "gpu" else "")
        for name, count in peak_memory().items()
    ]
    return "peak memory " + ", ".join(parts) if parts else ""


def size_text(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
