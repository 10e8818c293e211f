"""Seconds of a device that computes behind the host.

A CUDA device is given work and does it later: the host's clock alone would bill that work to
whoever waits next, and controllers would learn prices from it that nothing has. Elsewhere all of
this is the host's clock.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any  # a float of time.perf_counter, or a torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Now, in the order of the work that the device was given."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Between two marks that the device has passed."""
    return float(end - start if isinstance(end, float) else 1e-3 * start.elapsed_time(end))


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
