"""OpenVINO GenAI in its own Python: a job in JSON becomes answers in JSON.

ENV/bin/python answer_openvino.py JOB ANSWERS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    has_draft, how = job["draft"] is not None, {}
    if has_draft:
        how["draft_model"] = genai.draft_model(job["draft"], "CPU", **EXACT)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    pipe = genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **EXACT, **how)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job["new_tokens"], True, False
    if has_draft:
        config.num_assistant_tokens = job["length"]
    answers: dict[str, Any] = {"ids": [], "drafted": 0, "accepted": 0, "rounds": 0}
    for prompt in job["prompts"]:
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        made = pipe.generate(genai.TokenizedInputs(ids, mask), config)
        answers["ids"].append([int(token) for token in made.tokens[0]])
        if has_draft:
            counted = made.extended_perf_metrics
            accepted = counted.get_num_accepted_tokens()
            rounds = len(answers["ids"][-1]) - accepted - 1
            drafted = counted.get_num_draft_tokens()  # 0 of DFlash, which drafts whole blocks
            answers["drafted"] += drafted or rounds * job["length"]
            answers["accepted"] += accepted
            answers["rounds"] += rounds
    answers["version"] = "openvino-genai " + genai.__version__.split("-")[0]
    answer_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
