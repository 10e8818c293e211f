"""transformers' assisted generation, in this Python or another."""

from __future__ import annotations

from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import run_pair


def answer(job: EngineJob, drafts: bool) -> Answers:
    return run_pair("transformers", job, drafts, job.place)


ENGINE = ServingEngine(
    name="transformers",
    module="transformers",
    install="ENV/bin/pip install transformers torch",
    reads=("hf",),
    answer=answer,
)
