"""Is a plan right? For each recipe: the plan (and one with a rehearsal), then the run itself.

    python benchmarks/plan_accuracy.py --recipes eagle3,medusa --set train.steps=120 --rehearse
    python benchmarks/plan_accuracy.py --processor

Time is of the whole command; memory is the largest resident set; disk is what the run folder held
at its fullest. All three as planned over measured. `--processor` counts seconds of the processor on
both sides, for a machine that does other work meanwhile: set OMP_NUM_THREADS=1 beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specctl

PAUSE = 0.25  # seconds between two looks at the run


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run: seconds, peak resident bytes, peak bytes on disk; seconds of the processor."""

    seconds: float
    memory: float
    disk: float
    processor: float = 0.0


def planned(plan: dict[str, Any]) -> Figures:
    """The middle of what a plan says."""
    low, high = plan["seconds_range"]
    return Figures((low + high) / 2, plan["memory_bytes"], plan["disk_bytes"])


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "specctl", *words, "--json"]


def answer(words: list[str]) -> dict[str, Any]:
    """The plan that `specctl plan` prints."""
    done = subprocess.run(command(words), capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)["result"]["plan"]
    return found


def processor_seconds(recipe: str, target: str, sets: list[str]) -> float:
    """What a plan's calibration comes to in seconds of the processor; for a process of its own."""
    from specctl.recipes.load import load_recipe
    from specctl.train.planning.calibration import calibrate
    from specctl.train.planning.target_shape import target_shape
    from specctl.train.planning.weighing import data_tokens

    start, given = time.process_time(), load_recipe(recipe, sets, target=target)
    pace = calibrate(given, target_shape(given.target), start=start, clock=time.process_time)
    assert pace is not None, "a target that is calibrated"
    return pace.seconds(given.data, given.train, data_tokens(given.data))


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(specctl.__path__[0]).parent)}


def measured(words: list[str], out: Path) -> Figures:
    """What the run takes, watched from outside."""
    began, memory, disk = time.perf_counter(), 0, 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (out.parent / "log").open("w") as log:
        process = subprocess.Popen(command(words), stdout=log, stderr=log, env=environment())
        while process.poll() is None:
            memory = max(memory, resident(process.pid))
            disk = max(disk, folder_bytes(out))
            time.sleep(PAUSE)
    if process.returncode != 0:
        raise SystemExit((out.parent / "log").read_text()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figures(time.perf_counter() - began, memory, max(disk, folder_bytes(out)), used)


def resident(pid: int) -> int:
    """Largest resident set of a process so far."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def folder_bytes(folder: Path) -> int:
    """Of all files below a folder that may change while it is read."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
        except OSError:
            continue
    return total


def ratios(plan: Figures, run: Figures) -> str:
    parts = (
        f"time {plan.seconds:7.1f} s / {run.seconds:7.1f} s = {plan.seconds / run.seconds:5.2f}",
        f"memory {plan.memory / 1e6:6.0f} / {run.memory / 1e6:6.0f} MB "
        f"= {plan.memory / run.memory:5.2f}",
        f"disk {plan.disk / 1e6:6.1f} / {run.disk / 1e6:6.1f} MB = {plan.disk / run.disk:5.2f}",
    )
    return " | ".join(parts)


def compared(recipe: str, options: argparse.Namespace) -> None:
    words = ["--recipe", recipe, "--target", options.target]
    words += [word for field in options.sets for word in ("--set", field)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        plan = planned(answer(["plan", *words]))
        if options.processor:
            mine = [sys.executable, __file__, "--recipes", recipe, "--target", options.target]
            mine += [word for field in options.sets for word in ("--set", field)]
            told = subprocess.check_output([*mine, "--calibrate"], env=environment(), text=True)
            plan = replace(plan, seconds=float(told.split()[-1]))
        close = planned(answer(["plan", "--rehearse", *words])) if options.rehearse else None
        run = measured(["train-draft", *words, "--out", str(out)], out)
    if options.processor:
        run = replace(run, seconds=run.processor)
    print(f"{recipe:12s} planned:   {ratios(plan, run)}", flush=True)
    if close is not None:
        print(f"{recipe:12s} rehearsed: {ratios(close, run)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare plans with runs.")
    parser.add_argument("--recipes", default="distill,eagle3,medusa,dflash,hass,p-eagle")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--rehearse", action="store_true", help="rehearse the plan, too")
    parser.add_argument("--processor", action="store_true", help="seconds of the processor")
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for recipe in options.recipes.split(","):
        if options.calibrate:
            print(processor_seconds(recipe, options.target, options.sets))
        else:
            compared(recipe, options)


if __name__ == "__main__":
    main()
