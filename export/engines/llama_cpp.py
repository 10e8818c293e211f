"""llama.cpp's server (by the wheel xllamacpp) on a target that our own writer turned into GGUF. It
also reads texts, of every class of bytes, as the tokens that the target's own tokenizer makes."""

from __future__ import annotations

from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import run_host
from specctl.export.formats.gguf import FILE, SPEC_TYPES
from specctl.export.layouts.llama_cpp.target import write_target
from specctl.export.layouts.llama_cpp.tokens import PROBES
from specctl.export.layouts.llama_cpp.vocab import vocabulary_of

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
        "texts": [] if drafts else _texts(job),
    }
    return run_host("llama_cpp", job.python, body, job.scratch)


def _texts(job: EngineJob) -> list[tuple[str, list[int]]]:
    """Texts and their tokens, without those that llama.cpp is known to read otherwise."""
    tokenizer = job.target.tokenizer
    alike = vocabulary_of(tokenizer, job.manifest.model_spec).is_read_alike
    return [(t, tokenizer.encode(t, add_special_tokens=False)) for t in PROBES if alike(t)]


ENGINE = ServingEngine(
    name="llama.cpp",
    module="xllamacpp",
    install="ENV/bin/pip install xllamacpp",
    reads=("gguf",),
    answer=answer,
)
