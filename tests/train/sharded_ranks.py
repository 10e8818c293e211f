"""Run in two processes by test_sharding.py: the toy job, its weights spread over both, and a whole
run on a target that is spread as well; a target of tensor parallelism; the toy job of whole
weights. All in the same two: to start them takes longer than any of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from specctl.runtime.target.placement.tensor_parallel import is_known
from specctl.train.distributed.pieces import local
from specctl.train.distributed.ranks import Ranks
from specctl.train.loop import TrainProgress, restore, train
from specctl_testing.train import parallel_run, plain_run, sharded_run, toy

out = Path(sys.argv[1])
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
ranks = Ranks.current(accelerator.device)
assert ranks.size == 2
SAME = json.loads(sys.argv[2])


def whole_run() -> None:
    """Losses, weights and pieces of a run from its first step to its last."""
    job = toy.make_job(out / "sharded", ranks=ranks, is_sharded=True, **SAME)
    own = sum(local(p).numel() for p in job.drafter.trainable().values())
    state = [own, sum(p.numel() for p in job.drafter.trainable().values())]
    report["pieces"] = ranks.gather(state)
    train(job, TrainProgress())
    held = [value for each in job.optimizers.values() for value in each.state.values()]
    report["held"] = ranks.gather(sum(local(v).numel() for s in held for v in s.values() if v.ndim))
    with job.drafter.whole() as drafter:
        if ranks.is_main:
            report["whole"] = toy.digest(drafter.tensors())
    tensors = job.drafter.tensors()
    report["gathered"] = ranks.gather(len(tensors))


def resumed_run() -> None:
    """Six steps made by one process are continued by two."""
    job = toy.make_job(out / "handed", ranks=ranks, is_sharded=True, **SAME)
    train(job, restore(job, job.checkpoints.load(6)))


def silent_rank() -> None:
    """The second rank's rows hold nothing to predict: both must still come to the end."""

    def batch(rows: list[int]) -> object:
        made = toy.rows(rows)
        if ranks.rank == 1:
            made.loss_mask_BS.zero_()
        return made

    job = toy.make_job(out / "silent", ranks=ranks, is_sharded=True, batch=batch, **SAME)
    report["silent"] = train(job, TrainProgress()).step


report: dict[str, object] = {}
whole_run()
resumed_run()
silent_rank()
if is_known():
    report["parallel"] = parallel_run.compared(str(out / "target"), ranks)
report["plain"] = plain_run.run(out / "plain", ranks)
if ranks.is_main:
    (out / "report.json").write_text(json.dumps(report))
sharded_run.run(out / "two", out / "words.txt", json.loads(sys.argv[3]))
