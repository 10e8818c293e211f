"""llama.cpp in its own Python: settings on the command line, then a request a line, answers a line.

ENV/bin/python answer_llama_cpp.py '{"model": GGUF, "draft": GGUF or null, "lookup": 0, "threads": 2}'
Request: {"prompt": ids, "tokens": n}; answer: {"seconds": s, "ids": [...]}, seconds by the server's
own clock, of prompt and answer.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import xllamacpp


def parameters(job: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_parallel, params.n_ctx, params.n_gpu_layers, params.port = 1, 1024, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    if job.get("lookup"):
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
        params.speculative.types = [kind]
    if job.get("draft"):
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        params.speculative.types = [kind]
        how = params.speculative.draft
        how.mparams.path, how.n_max, how.n_min, how.p_min = job["draft"], job["length"], 0, 0.0
        how.cpuparams.n_threads = how.cpuparams_batch.n_threads = job["threads"]
        how.n_gpu_layers = 0
    return params


def main() -> None:
    server = xllamacpp.Server(parameters(json.loads(sys.argv[1])))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        body = {"prompt": asked["prompt"], "n_predict": asked["tokens"], "temperature": 0.0}
        body |= {"return_tokens": True, "ignore_eos": True, "cache_prompt": False}
        headers = {"Content-Type": "application/json"}
        url = f"{server.listening_address}/completion"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers=headers)
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        spent = answer["timings"]["prompt_ms"] + answer["timings"]["predicted_ms"]
        print(json.dumps({"seconds": spent / 1e3, "ids": answer["tokens"]}), flush=True)


if __name__ == "__main__":
    main()
