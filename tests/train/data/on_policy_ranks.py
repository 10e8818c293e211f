"""Run in two processes by test_on_policy.py: both read what the first one's drafter wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import test_on_policy as shared
import torch
from accelerate import Accelerator

from specctl.train.distributed.ranks import Ranks
from specctl_testing.models import build_model

out = Path(sys.argv[1])
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
ranks = Ranks.current(accelerator.device)
assert ranks.size == 2


def make_target(*args: object, **fields: object) -> object:
    return shared.Target.from_model(build_model(*args, **fields))


text = shared.on_policy(out / f"data-{ranks.rank}", make_target, ranks=ranks)
if not ranks.is_main:
    with torch.no_grad():
        for parameter in text.drafter.module.parameters():
            parameter.zero_()
text.refresh(0, 0)
digests = ranks.gather(shared.runs.digest(text.tensors()))
if ranks.is_main:
    (out / "digests.json").write_text(json.dumps(digests))
accelerator.end_training()
