"""MLX's generation with a draft model (mlx-lm), on Apple's chips and on CPUs."""

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
    return run_host("mlx", job.python, body, job.scratch)


ENGINE = ServingEngine(
    name="mlx",
    module="mlx_lm",
    install="ENV/bin/pip install mlx-lm (on Linux also 'mlx[cpu]')",
    reads=("hf",),
    answer=answer,
)
