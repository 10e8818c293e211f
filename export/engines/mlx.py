"""MLX's generation with a draft model (mlx-lm), on Apple's chips and on CPUs."""

from __future__ import annotations

from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import run_pair


def answer(job: EngineJob, drafts: bool) -> Answers:
    return run_pair("mlx", job, drafts, job.place)


ENGINE = ServingEngine(
    name="mlx",
    module="mlx_lm",
    install="ENV/bin/pip install mlx-lm (on Linux also 'mlx[cpu]')",
    reads=("hf",),
    answer=answer,
)
