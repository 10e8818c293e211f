"""A script of the tests in two processes that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import specctl

TESTS = Path(__file__).parents[2]


def run_twice(script: Path, *words: str, timeout: float) -> None:
    """Run to the end. A process that fails or is killed says where it stood; all of it is shown,
    because torchrun's own report comes last and is longer than what it reports."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {
        "PYTHONPATH": f"{Path(specctl.__path__[0]).parent}{os.pathsep}{TESTS}",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [*launch, str(script), *words],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}\n{done.stderr}"
