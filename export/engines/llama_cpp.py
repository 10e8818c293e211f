"""llama.cpp's server (by the wheel xllamacpp) on a target that our own writer turned into GGUF."""

from __future__ import annotations

from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import run_host
from specctl.export.formats.gguf import FILE, SPEC_TYPES
from specctl.export.layouts.llama_cpp.target import write_target

_TARGET = "target.gguf"


def answer(job: EngineJob, drafts: bool) -> Answers:
    """The target's file is written once, float32 as the weights are loaded."""
    model = job.scratch / _TARGET
    if not model.exists():
        write_target(job.target, model)
    kind = SPEC_TYPES[job.manifest.family]
    draft = {"path": str(job.folder / FILE), "kind": kind, "length": job.length}
    body = {
        "model": str(model),
        "prompts": [list(prompt) for prompt in job.prompts],
        "new_tokens": job.new_tokens,
        "context": max(map(len, job.prompts)) + job.new_tokens + 32,
        "draft": draft if drafts else None,
    }
    return run_host("llama_cpp", job.python, body, job.scratch)


ENGINE = ServingEngine(
    name="llama.cpp",
    module="xllamacpp",
    install="ENV/bin/pip install xllamacpp",
    reads=("gguf",),
    answer=answer,
)
