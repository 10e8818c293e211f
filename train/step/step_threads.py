"""On how many threads the steps of training run, beside the other work of the machine: chosen as
those of PyTorch's forwards are (models/torch_threads.py), and said once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from specctl.models.native.threads import Threads
from specctl.models.torch_threads import TorchThreads, are_given
from specctl.runtime.measure.reporter import Reporter
from specctl.train.distributed.ranks import Ranks


@dataclass(slots=True)
class StepThreads:
    """The number of threads of each step."""

    reporter: Reporter
    chosen: TorchThreads
    is_said: bool = False

    @classmethod
    def of(cls, ranks: Ranks, reporter: Reporter) -> StepThreads:
        """Chosen for one process on a CPU. Several have shared the cores out, and wait for each
        other: none of them can judge by its own time."""
        most = torch.get_num_threads()
        is_alone = ranks.device.type == "cpu" and ranks.size == 1
        is_given = not is_alone or are_given(most)
        threads = None if is_given else Threads(most, fewest=1, slow=0.0)
        return cls(reporter, TorchThreads(threads))

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of about the same work as the others; all threads are back behind it."""
        with self.chosen.step():
            yield
        threads = self.chosen.threads
        if threads is not None and threads.chosen < threads.most and not self.is_said:
            self.is_said = True
            self.reporter.say(
                f"other processes keep the cores busy: steps run on {threads.chosen} of "
                f"{threads.most} threads where that is faster, and the ETA follows"
            )
