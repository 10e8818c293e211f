"""The toy job on two CPU processes, each with whole weights, then failures of one; for
test_sharding.py."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import torch

from specctl.core.errors import SpecctlError
from specctl.core.storage.files import Disk
from specctl.train.distributed.ranks import Ranks
from specctl.train.loop import TrainProgress, restore, train
from specctl.train.stop import Interrupted, Stop
from specctl_testing.train import toy


def run(out: Path, ranks: Ranks) -> dict[str, Any]:
    """What the processes found: digests, exits and what was kept."""
    made = TwoRanks(out, ranks)
    made.whole_run()
    made.full_disk_on_one_rank()
    made.signal_on_one_rank()
    return made.report


class FullOnRankOne(Disk):
    """No room on the second rank, plenty on the first."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


class TwoRanks:
    def __init__(self, out: Path, ranks: Ranks) -> None:
        self.out, self.ranks, self.report = out, ranks, dict[str, Any]()
        self.plain: dict[str, Any] = {
            "dropout": 0.0, "dtype": torch.float64, "optimizer": "adamw", "ranks": ranks,
        }  # fmt: skip

    def whole_run(self) -> None:
        job = toy.make_job(self.out / "whole", **self.plain, accumulate=2, rows=4)
        train(job, TrainProgress())
        self.report["digests"] = self.ranks.gather(toy.digest(job.drafter.tensors()))

    def full_disk_on_one_rank(self) -> None:
        out = self.out / "full"
        train(toy.make_job(out, **self.plain, steps=6), TrainProgress())
        job = toy.make_job(out, **self.plain, steps=12, disk=FullOnRankOne(self.ranks.rank))
        try:
            train(job, restore(job, job.checkpoints.newest()))
        except SpecctlError as error:
            self.report["full"] = self.ranks.gather((int(error.exit), str(error)))
        self.report["full_newest"] = toy.make_job(out, **self.plain).checkpoints.newest().step

    def signal_on_one_rank(self) -> None:
        stop = Stop("again")
        stop.is_deferred = True
        seen: list[list[int]] = []

        def batch(rows: list[int]) -> object:
            seen.append(rows)
            if self.ranks.rank == 1 and len(seen) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return toy.rows(rows)

        # ranks draw different numbers, each has its own state
        fields = {**self.plain, "dropout": 0.3}
        job = toy.make_job(self.out / "stop", **fields, batch=batch, stop=stop)
        with stop.listening():
            try:
                train(job, TrainProgress())
            except Interrupted as error:
                found = int(error.exit), job.checkpoints.steps()
                self.report["stopped"] = self.ranks.gather(found)
        again = toy.make_job(self.out / "stop", **fields)
        torch.rand(3)
        train(again, restore(again, again.checkpoints.newest()))
        straight = toy.make_job(self.out / "straight", **fields)
        train(straight, TrainProgress())
        self.report["resumed"] = [toy.digest(job.drafter.tensors()) for job in (again, straight)]
