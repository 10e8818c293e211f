"""Run in two processes by test_run.py: the toy job on two CPU processes, then failures of one."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from specctl.core.errors import Exit, SpecctlError
from specctl.core.storage.files import Disk
from specctl.train.distributed.ranks import Ranks
from specctl.train.loop import TrainProgress, restore, train
from specctl.train.stop import Interrupted, Stop
from specctl_testing.train import toy

out = Path(sys.argv[1])
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
ranks = Ranks.current(accelerator.device)
assert ranks.size == 2
PLAIN = {"dropout": 0.0, "dtype": torch.float64, "optimizer": "adamw", "ranks": ranks}


class FullOnRankOne(Disk):
    """No room on the second rank, plenty on the first."""

    def write(self, descriptor: int, data: memoryview) -> int:
        if ranks.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


def whole_run() -> None:
    job = toy.make_job(out / "whole", **PLAIN, accumulate=2, rows=4)
    train(job, TrainProgress())
    report["digests"] = ranks.gather(toy.digest(job.drafter.tensors()))


def full_disk_on_one_rank() -> None:
    train(toy.make_job(out / "full", **PLAIN, steps=6), TrainProgress())
    job = toy.make_job(out / "full", **PLAIN, steps=12, disk=FullOnRankOne())
    try:
        train(job, restore(job, job.checkpoints.newest()))
    except SpecctlError as error:
        report["full"] = ranks.gather((int(error.exit), str(error)))
    report["full_newest"] = toy.make_job(out / "full", **PLAIN).checkpoints.newest().step


def signal_on_one_rank() -> None:
    stop = Stop("again")
    stop.is_deferred = True
    seen: list[list[int]] = []

    def batch(rows: list[int]) -> object:
        seen.append(rows)
        if ranks.rank == 1 and len(seen) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy.rows(rows)

    fields = {**PLAIN, "dropout": 0.3}  # ranks draw different numbers, each has its own state
    job = toy.make_job(out / "stop", **fields, batch=batch, stop=stop)
    with stop.listening():
        try:
            train(job, TrainProgress())
        except Interrupted as error:
            report["stopped"] = ranks.gather((int(error.exit), job.checkpoints.steps()))
    again = toy.make_job(out / "stop", **fields)
    torch.rand(3)
    train(again, restore(again, again.checkpoints.newest()))
    straight = toy.make_job(out / "straight", **fields)
    train(straight, TrainProgress())
    report["resumed"] = [toy.digest(job.drafter.tensors()) for job in (again, straight)]


report: dict[str, object] = {"exit": int(Exit.RESOURCES)}
whole_run()
full_disk_on_one_rank()
signal_on_one_rank()
if ranks.is_main:
    (out / "report.json").write_text(json.dumps(report))
accelerator.end_training()
