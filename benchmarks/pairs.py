"""Two ways in turn on the same texts: what each text took, the mean of the ratios with its error,
and processes that keep the machine busy meanwhile."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, stdev

# Compiles the standard library in memory over and over, as long as its parent lives.
COMPILING = """
import os, pathlib, sysconfig
parent, folder = os.getppid(), pathlib.Path(sysconfig.get_path("stdlib"))
texts = [path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py"))]
while True:
    for text in texts:
        if os.getppid() != parent:
            raise SystemExit
        compile(text, "text", "exec")
"""


@dataclass(slots=True)
class Spent:
    """Wall-clock and processor seconds of every text."""

    walls: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)

    def add(self, began: tuple[float, float]) -> None:
        self.walls.append(time.perf_counter() - began[0])
        self.processors.append(time.process_time() - began[1])

    @property
    def wall(self) -> float:
        return sum(self.walls)

    @property
    def processor(self) -> float:
        return sum(self.processors)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def mean_ratio(
    pairs: Sequence[tuple[Spent, Spent]], times: str = "processors"
) -> tuple[float, float]:
    """Geometric mean of the texts' ratios, and its standard error."""
    logs = [
        math.log(a / b)
        for one, two in pairs
        for a, b in zip(getattr(one, times), getattr(two, times), strict=True)
    ]
    ratio, error = math.exp(mean(logs)), math.nan
    if len(logs) > 1:
        error = ratio * stdev(logs) / math.sqrt(len(logs))
    return round(ratio, 3), round(error, 3)


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """So many processes that compile Python's standard library."""
    command = [sys.executable, "-c", COMPILING]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
