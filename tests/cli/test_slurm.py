"""The Slurm script: what it starts, and that it goes on after its time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "accelerate" / "slurm.sh"

SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "$PLACE/srun"
trap 'exit 143' TERM
touch "$PLACE/started"
n=0; while [ "$n" -lt "$WORK" ]; do sleep 0.1; n=$((n + 1)); done
exit "$CODE"
"""
SCONTROL = """#!/bin/sh
echo "$@" >> "$PLACE/scontrol"
[ "$1" = show ] && printf 'node7\\nnode8\\n'
exit 0
"""


def start(folder: Path, code: int, work: int) -> subprocess.Popen[bytes]:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    given = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    given |= {"PLACE": str(folder), "CODE": str(code), "WORK": str(work)}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    words = ["--recipe", "qwen3-8b-eagle3", "--out", "/shared/a run"]
    return subprocess.Popen(
        ["bash", str(SCRIPT), *words], env={**os.environ, **given, "PATH": path}
    )


def requeued(folder: Path) -> bool:
    return "requeue 42" in (folder / "scontrol").read_text()


def test_it_starts_torchrun_with_words_that_torchrun_knows(tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    assert start(tmp_path, 0, 0).wait(20) == 0
    words = (tmp_path / "srun").read_text().splitlines()
    parsed = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert parsed.module
    assert parsed.training_script == "specctl"
    assert parsed.rdzv_endpoint == "node7:29500"
    assert parsed.training_script_args[-2:] == ["--out", "/shared/a run"]
    assert not requeued(tmp_path)


@pytest.mark.parametrize(("code", "again"), [(75, True), (3, False)])
def test_a_saved_state_is_continued_and_a_failure_is_not(
    tmp_path: Path, code: int, again: bool
) -> None:
    assert start(tmp_path, code, 0).wait(20) == (0 if again else code)
    assert requeued(tmp_path) is again


def test_the_signal_before_the_time_limit_reaches_the_run(tmp_path: Path) -> None:
    running = start(tmp_path, 0, 200)
    until = time.monotonic() + 20
    while not (tmp_path / "started").exists() and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 0
    assert requeued(tmp_path)
