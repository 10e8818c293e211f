"""A script of the tests in two processes, as torchrun would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

import specctl

TESTS = Path(__file__).parents[2]


def run_twice(script: Path, *words: str, timeout: float) -> None:
    """Run to the end; where one fails, so does the other. A process that fails or is killed says
    where it stood, and what both have said is shown. torchrun itself, which takes as long to start
    as they, is started by the commands (tests/cli)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": f"{Path(specctl.__path__[0]).parent}{os.pathsep}{TESTS}",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    with ExitStack() as stack:
        output = stack.enter_context(TemporaryFile())
        ranks = []
        for rank in ("0", "1"):
            process = subprocess.Popen(
                [sys.executable, str(script), *words],
                env=environment | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=output,
                stderr=output,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        deadline = time.monotonic() + timeout
        while any(rank.poll() is None for rank in ranks) and not any(r.returncode for r in ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [rank.returncode for rank in ranks]
        output.seek(0)
        shown = output.read().decode(errors="replace")
        assert codes == [0, 0], f"{script.name} ended with {codes}\n{shown}"
