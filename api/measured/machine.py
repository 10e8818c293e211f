"""What a measurement was made on: the words beside every figure."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specctl import __version__

GIB = 1 << 30


def made_by(command: Sequence[str], device: Any) -> dict[str, Any]:
    """How figures came about: the day (UTC), the command and the machine."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": day, "command": [*command], "machine": machine(device)}


def machine(device: Any) -> dict[str, Any]:
    """Of a device of torch: `chip`, its name; `cores` that this process may use; `memory_gib` of
    the machine or container (None where it does not say); system and versions."""
    import torch
    import transformers

    from specctl.train.planning.hardware import machine_bytes

    memory = machine_bytes()
    return {
        "chip": chip(device),
        "cores": usable_cores(),
        "memory_gib": None if memory is None else round(memory / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specctl": __version__,
    }


def chip(device: Any) -> str:
    """The name of a GPU or of the processor, as far as the system says it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
