"""OpenVINO GenAI in its own Python: settings on the command line, a request a line, answers a line.

ENV/bin/python answer_openvino.py '{"model": FOLDER, "draft": FOLDER or null, "lookup": 5, "threads": 2}'
FOLDER is a transformers folder; it is converted beside itself once, float32. Request: {"prompt":
ids, "tokens": n}; answer: {"seconds": s, "ids": [...]}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def converted(folder: str) -> str:
    out = Path(f"{folder}-openvino")
    if not (out / "openvino_model.xml").exists():
        tool = str(Path(sys.executable).with_name("optimum-cli"))
        words = [tool, "export", "openvino", "-m", folder, "--task", "text-generation-with-past"]
        subprocess.run([*words, "--weight-format", "fp32", str(out)], check=True, stdout=2)
    return str(out)


def pipeline(job: dict[str, Any]) -> Any:
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    settings["INFERENCE_NUM_THREADS"] = job["threads"]
    if job.get("lookup"):
        settings["prompt_lookup"] = True
    if job.get("draft"):
        draft = genai.draft_model(converted(job["draft"]), "CPU", **settings)
        return genai.LLMPipeline(converted(job["model"]), "CPU", draft_model=draft, **settings)
    return genai.LLMPipeline(converted(job["model"]), "CPU", **settings)


def main() -> None:
    job = json.loads(sys.argv[1])
    found = pipeline(job)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = asked["tokens"], True, False
        if job.get("lookup") or job.get("draft"):
            config.num_assistant_tokens = job["length"]
        if job.get("lookup"):
            config.max_ngram_size = 3
        ids = openvino.Tensor(np.array([asked["prompt"]], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(asked["prompt"])), dtype=np.int64))
        began = time.perf_counter()
        out = found.generate(genai.TokenizedInputs(ids, mask), config)
        spent = time.perf_counter() - began
        print(json.dumps({"seconds": spent, "ids": list(out.tokens[0])}), flush=True)


if __name__ == "__main__":
    main()
