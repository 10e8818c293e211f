"""transformers' assisted generation in its own Python: a job in JSON becomes answers in JSON.

ENV/bin/python answer_transformers.py JOB ANSWERS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


class Calls:
    """How often a model was read."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, *ignored: Any) -> None:
        self.count += 1


def load(folder: str) -> Any:
    made = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
    )
    made.generation_config.eos_token_id = None  # every answer has the same number of tokens
    made.generation_config.pad_token_id = 0
    return made.eval()


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    torch.set_num_threads(1)
    target = load(job["target"])
    reads, how = Calls(target), {}
    drafted = None
    if job["draft"] is not None:
        draft = load(job["draft"])
        draft.generation_config.num_assistant_tokens = job["length"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        drafted, how["assistant_model"] = Calls(draft), draft
    ids = []
    for prompt in job["prompts"]:
        out = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=job["new_tokens"],
            do_sample=False,
            **how,
        )
        ids.append(out[0, len(prompt) :].tolist())
    answers: dict[str, Any] = {"ids": ids, "version": f"transformers {transformers.__version__}"}
    if drafted is not None:
        answers |= {"drafted": drafted.count, "rounds": reads.count}
        answers["accepted"] = sum(map(len, ids)) - reads.count
    answer_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
