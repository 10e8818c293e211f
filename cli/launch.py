"""Run the same command in several processes, under Accelerate's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from specctl.recipes.errors import ResourceError


def is_launched() -> bool:
    """True inside a process that a launcher started."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_PROCESS_INDEX" in os.environ


def launch_command(arguments: Sequence[str], processes: int, is_cpu: bool) -> list[str]:
    """The command line that runs `specctl ARGUMENTS` in so many processes on this machine."""
    placement = ["--cpu", "--num_cpu_threads_per_process", "1"] if is_cpu else ["--multi_gpu"]
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
        *placement,
        "-m",
        "specctl",
        *arguments,
    ]


def relaunch(arguments: Sequence[str], processes: int, is_cpu: bool) -> int:
    """Run this very command again in `processes` processes; returns their exit code."""
    return subprocess.call(launch_command(arguments, processes, is_cpu))


def check_gpus(wanted: int) -> None:
    """Refuse more GPUs than there are."""
    import torch

    found = torch.cuda.device_count()
    if wanted > found:
        raise ResourceError(
            f"{wanted} GPUs were asked for",
            where="--gpus",
            found=f"{found} GPU{'s' if found != 1 else ''}",
            expected=f"at least {wanted}",
            do=f"--gpus {found}" if found else "leave --gpus out, or --processes 2 for CPU ones",
        )
