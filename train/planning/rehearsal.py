"""A rehearsal: the run itself, small, in a process of its own, timed in its parts.

Same target, same batches, same measurements of tau; only fewer prompts and fewer steps. What does
not depend on their number (imports, the target, reading the text, packaging) is taken as it is, the
rest by the piece. Peak memory is that of the process, for everything that needs much of it is done.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.recipes.schema import DataPart, TrainPart
from specctl.runtime.measure.reporter import Advance, SilentReporter
from specctl.train.data.rows.rows import read_manifest
from specctl.train.planning.pace import Pace
from specctl.train.planning.work import ANSWERS, QUESTIONS

PROMPTS, STEPS = 64, 5  # one shard of answers; the first step is slower and is left out
TRAIN = "train"
WITHIN = (0.85, 1.15)  # of the seconds that a rehearsal promises


@dataclass(frozen=True, slots=True)
class Rehearsal(Pace):
    """What a small run took. Bytes at most: `memory`, `gpu`. `tokens` of its rows."""

    memory: int
    gpu: int
    tokens: int

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Rehearsal:
        return cls(**fields)


def small_train(train: TrainPart) -> TrainPart:
    """How the rehearsal trains."""
    return train.model_copy(
        update={
            "steps": STEPS, "tau_every": STEPS, "save_every": STEPS, "log_every": 1,
            "trackers": (), "reference_steps": None,
        }
    )  # fmt: skip


def small_data(data: DataPart) -> DataPart:
    """The data of the rehearsal."""
    return data.model_copy(update={"prompts": min(data.prompts, PROMPTS)})


@dataclass(slots=True)
class Stopwatch(SilentReporter):
    """A reporter that notes when what began and ended. One writer: the rehearsal."""

    warnings: list[str] = field(default_factory=list)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    all_spent: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    measured: float = 0.0

    def say(self, text: str) -> None:
        if "measured tau" in text:
            self.measured = time.perf_counter()

    @contextmanager
    def task(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        self.began[label] = time.perf_counter()
        if label == TRAIN:
            self.steps.clear()  # those of a reference

        def advance(amount: int, note: str = "") -> None:
            if label == TRAIN and amount:
                self.steps.append(time.perf_counter())

        yield advance
        self.ended[label] = time.perf_counter()
        spent = self.ended[label] - self.began[label]
        self.all_spent[label] = self.all_spent.get(label, 0.0) + spent

    def spent(self, label: str) -> float:
        """Seconds in all tasks of that name."""
        return self.all_spent.get(label, 0.0)


def summary(data: DataPart, out: Path, watch: Stopwatch, whole: float, gpu: int) -> Rehearsal:
    """What a finished rehearsal in `out` shows; `whole` seconds from the start of its process."""
    ends = [watch.began[TRAIN], *watch.steps]
    each = [after - before for before, after in itertools.pairwise(ends)]
    answers, training = watch.spent(ANSWERS), watch.spent(TRAIN)
    step = statistics.median(each[1:])
    manifest = read_manifest(out / "data")
    assert manifest is not None, "a finished run has its data"
    return Rehearsal(
        once=whole - watch.spent(QUESTIONS) - answers - training,
        answer=answers / data.prompts,
        step=step,
        tau=watch.measured - watch.steps[-1],
        save=watch.ended[TRAIN] - watch.measured,
        memory=peak_bytes(),
        gpu=gpu,
        tokens=manifest.tokens,
        write=max(0.0, each[0] - step) if data.on_policy else 0.0,
    )


def peak_bytes() -> int:
    """Resident bytes of this process at most. Not getrusage: what a process was before it became
    this program counts there, too."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def read_rehearsal(path: Path) -> Rehearsal:
    return Rehearsal.from_json(json.loads(path.read_text()))
