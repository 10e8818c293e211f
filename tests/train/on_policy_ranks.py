"""Run by torchrun in test_on_policy.py: two processes read what the first one's drafter wrote."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from specctl.train.processes.ranks import Ranks

here = Path(__file__).parent
sys.path.insert(0, str(here.parent))
import conftest  # noqa: E402  (the random targets of the tests)

spec = importlib.util.spec_from_file_location("on_policy", here / "test_on_policy.py")
assert spec is not None
assert spec.loader is not None
shared = importlib.util.module_from_spec(spec)
sys.modules["on_policy"] = shared
spec.loader.exec_module(shared)

out = Path(sys.argv[1])
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
ranks = Ranks.current(accelerator.device)
assert ranks.size == 2


def make_target(*args: object, **fields: object) -> object:
    return shared.Target.from_model(conftest.build_model(*args, **fields))


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
