"""How much memory this process has needed at most."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from specctl.core.messages.sizes import size_text

FEW = 0.1  # of the peak: fewer mapped bytes are not worth a word


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
    """`peak memory 812.0 MB`, with the GPU's where there is one; empty if unknown."""
    peak, mapped = peak_memory(), mapped_bytes()
    parts = []
    if "process" in peak:
        files = f" ({size_text(mapped)} of it mapped files)"
        parts.append(size_text(peak["process"]) + files * (mapped > FEW * peak["process"]))
    if "gpu" in peak:
        parts.append(size_text(peak["gpu"]) + " on the GPU")
    return "peak memory " + ", ".join(parts) if parts else ""


def mapped_bytes() -> int:
    """Resident bytes of mapped files, such as features on disk: they count in the peak, but the
    system takes them back where it needs room. 0 where that is not known."""
    try:
        found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
