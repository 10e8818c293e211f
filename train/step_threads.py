"""On how many threads the steps of training run, beside the other work of the machine.

PyTorch's threads wait for each other after every operator, by spinning: beside one busy process a
step on two threads of two cores takes twice as long as on one. So where the system puts threads of
this process off their cores, steps on fewer threads take turns with the others, and the faster
number stays (models/native/threads.py, as in decoding). Sums of floating-point numbers may depend
on it in their last digits: whoever sets OMP_NUM_THREADS has that number throughout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from specctl.models.native.threads import Kind, Threads
from specctl.runtime.measure.reporter import Reporter
from specctl.train.distributed.ranks import Ranks

CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by the user, or by who started several processes


@dataclass(slots=True)
class StepThreads:
    """The number of threads, chosen anew before each step; `threads` is None where it is given."""

    reporter: Reporter
    threads: Threads | None
    fastest: dict[Kind, float] = field(default_factory=dict)  # seconds, of steps on all threads
    is_said: bool = False

    @classmethod
    def of(cls, ranks: Ranks, reporter: Reporter) -> StepThreads:
        """Chosen for one process on a CPU. Several have shared the cores out, and wait for each
        other: none of them can judge by its own time."""
        most = torch.get_num_threads()
        is_alone = ranks.device.type == "cpu" and ranks.size == 1
        is_given = not is_alone or most == 1 or any(name in os.environ for name in CHOSEN)
        return cls(reporter, None if is_given else Threads(most, fewest=1, slow=0.0))

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of about the same work as the others; all threads are back behind it."""
        if self.threads is None:
            yield
            return
        began = time.perf_counter()
        torch.set_num_threads(self.threads.begin(began))
        try:
            yield
        finally:
            torch.set_num_threads(self.threads.most)
        now = time.perf_counter()
        self.threads.end((), now - began, now, self.fastest)
        self._say(self.threads.chosen, self.threads.most)

    def _say(self, chosen: int, most: int) -> None:
        if chosen < most and not self.is_said:
            self.is_said = True
            self.reporter.say(
                f"other processes keep the cores busy: steps run on {chosen} of {most} threads "
                "where that is faster, and the ETA follows"
            )
