"""llama.cpp's server on a GGUF file, in its own Python: a job in JSON becomes answers in JSON.

ENV/bin/python answer_llama_cpp.py JOB ANSWERS
"""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp


def parameters(job: dict[str, Any]) -> Any:
    """One slot, float32 caches; the fused attention rounds to half precision inside."""
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_parallel, params.n_ctx, params.n_gpu_layers, params.port = 1, job["context"], 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    float32 = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_k = params.cache_type_v = float32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    draft = job["draft"]
    if draft is not None:
        kind = "COMMON_SPECULATIVE_TYPE_" + draft["kind"].upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        how = params.speculative.draft
        how.mparams.path, how.n_max, how.n_min, how.p_min = draft["path"], draft["length"], 0, 0.0
        how.cpuparams.n_threads = how.cpuparams_batch.n_threads = 1
        how.n_gpu_layers, how.cache_type_k, how.cache_type_v = 0, float32, float32
    return params


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    server = xllamacpp.Server(parameters(job))
    url = server.listening_address
    answers: dict[str, Any] = {"ids": [], "drafted": 0, "accepted": 0, "rounds": 0}
    answers["misread"] = []
    for prompt in job["prompts"]:
        body = {"prompt": prompt, "n_predict": job["new_tokens"], "temperature": 0.0}
        body |= {"return_tokens": True, "ignore_eos": True, "cache_prompt": False}
        answer = post(f"{url}/completion", body)
        answers["ids"].append(answer["tokens"])
        accepted = answer["timings"].get("draft_n_accepted", 0)
        answers["drafted"] += answer["timings"].get("draft_n", 0)
        answers["accepted"] += accepted
        answers["rounds"] += len(answer["tokens"]) - accepted - 1
    for text, ids in job["texts"]:
        body = {"content": text, "add_special": False, "parse_special": False}
        if post(f"{url}/tokenize", body)["tokens"] != ids:
            answers["misread"].append(text)
    answers["version"] = "xllamacpp " + version("xllamacpp")
    answer_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
