"""transformers' assisted generation, in this Python or another."""

from __future__ import annotations

from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import run_host


def answer(job: EngineJob, drafts: bool) -> Answers:
    body = {
        "target": job.place,
        "draft": str(job.folder) if drafts else None,
        "prompts": [list(prompt) for prompt in job.prompts],
        "new_tokens": job.new_tokens,
        "length": job.length,
    }
    return run_host("transformers", job.python, body, job.scratch)


ENGINE = ServingEngine(
    name="transformers",
    module="transformers",
    install="ENV/bin/pip install transformers torch",
    reads=("hf",),
    answer=answer,
)
