"""The device on which a run of one process trains here. Accelerate reads the choice of --device
from its own variables; what plans, calibrates and checks a run has to read the same ones."""

from __future__ import annotations

import os

import torch

from specctl.runtime.target.placement.device import choose_device

TRUE = ("1", "true", "t", "yes", "y", "on")  # as Accelerate reads them


def is_cpu_chosen() -> bool:
    """Whether Accelerate was told to use the CPU, whatever GPUs there are."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE


def run_device() -> torch.device:
    """What --device chose, else the first GPU, else the CPU."""
    if is_cpu_chosen():
        return torch.device("cpu")
    return choose_device(os.environ.get("ACCELERATE_TORCH_DEVICE") or "auto")
