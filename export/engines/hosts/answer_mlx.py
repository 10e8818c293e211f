"""MLX's generation with a draft model, in its own Python: a job in JSON becomes answers in JSON.

ENV/bin/python answer_mlx.py JOB ANSWERS
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step, speculative_generate_step


def model_of(folder: str) -> Any:
    model = load(folder)[0]
    model.set_dtype(mx.float32)
    return model


def rounds_of(drafted: list[bool], most: int) -> tuple[int, int]:
    """Rounds and drafted tokens of a text: which of its tokens were drafted, and how many a round
    drafts unless the text ends before."""
    rounds = offered = at = 0
    while at < len(drafted):
        rounds, offered = rounds + 1, offered + min(len(drafted) - at, most)
        for _ in range(min(len(drafted) - at, most)):
            if not drafted[at]:
                break
            at += 1
        at += 1  # the target's own token
    return rounds, offered


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    target = model_of(job["target"])
    draft = None if job["draft"] is None else model_of(job["draft"])
    answers: dict[str, Any] = {"ids": [], "drafted": 0, "accepted": 0, "rounds": 0}
    for prompt in job["prompts"]:
        text, tokens = mx.array(prompt), job["new_tokens"]
        if draft is None:
            made = generate_step(text, target, max_tokens=tokens)
            answers["ids"].append([int(token) for token, _ in made])
            continue
        step = speculative_generate_step(
            text, target, draft, num_draft_tokens=job["length"], max_tokens=tokens
        )
        said = [(int(token), bool(is_drafted)) for token, _, is_drafted in step]
        answers["ids"].append([token for token, _ in said])
        flags = [is_drafted for _, is_drafted in said]
        rounds, offered = rounds_of(flags, job["length"])
        answers["rounds"] += rounds
        answers["drafted"] += offered
        answers["accepted"] += sum(flags)
    answers["version"] = f"mlx-lm {version('mlx-lm')} (mlx {version('mlx')})"
    answer_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
