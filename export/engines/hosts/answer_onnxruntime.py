"""Speculative decoding over two ONNX graphs, target and draft, by ONNX Runtime on the CPU, and what
a graph computes: a job in JSON becomes answers in JSON.

ENV/bin/python answer_onnxruntime.py JOB ANSWERS

ONNX Runtime has no speculative decoding of its own, so the greedy loop stands here: the draft
writes a chain, the target reads it at once, caches are cut to what was kept. A job with "logits"
wants what the graph of "draft" computes over the ids of its only prompt: all of them at once, and
the second half one by one.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


class CachedGraph:
    """A graph with a cache, which holds the first `length` tokens of one text."""

    def __init__(self, folder: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path, where = str(Path(folder) / "model.onnx"), ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=where)
        self.inputs = {port.name: port.shape for port in self.session.get_inputs()}
        self.outputs = [port.name for port in self.session.get_outputs()]
        self.cut(0)

    def cut(self, length: int) -> None:
        """Forget all but so many tokens."""
        if length == 0:
            shapes = {n: s for n, s in self.inputs.items() if n.startswith("past_key_values")}
            self.past = {
                name: np.zeros((1, shape[1], 0, shape[3]), dtype=np.float32)
                for name, shape in shapes.items()
            }
        else:
            self.past = {name: x[:, :, :length] for name, x in self.past.items()}
        self.length = length

    def __call__(self, ids: list[int]) -> Any:
        """[T, V]: behind each of these, which follow what the cache holds."""
        end = self.length + len(ids)
        fed = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(self.length, end, dtype=np.int64)[None],
            **self.past,
        }
        given = {name: x for name, x in fed.items() if name in self.inputs}
        out = dict(zip(self.outputs, self.session.run(None, given), strict=True))
        self.past = {name: out[name.replace("past_key_values", "present")] for name in self.past}
        self.length = end
        return out["logits"][0]


def chain(draft: CachedGraph, text: list[int], length: int) -> list[int]:
    """So many tokens behind the text, of which the cache holds a beginning."""
    drafted: list[int] = []
    while len(drafted) < length:
        said = draft([*text, *drafted][draft.length :])
        drafted.append(int(said[-1].argmax()))
    return drafted


def continued(
    prompt: list[int],
    target: CachedGraph,
    draft: CachedGraph | None,
    job: dict[str, Any],
    counts: Any,
) -> list[int]:
    target.cut(0)
    if draft is not None:
        draft.cut(0)
    text, end = list(prompt), len(prompt) + job["new_tokens"]
    while len(text) < end:
        most = min(job["length"], end - len(text) - 1)
        drafted = [] if draft is None else chain(draft, text, most)
        said = target([*text, *drafted][target.length :])[-1 - len(drafted) :].argmax(-1)
        kept = 0
        while kept < len(drafted) and drafted[kept] == int(said[kept]):
            kept += 1
        text += [*drafted[:kept], int(said[kept])]
        target.cut(len(text) - 1)
        if draft is not None:
            draft.cut(min(draft.length, len(text) - 1))
            counts["drafted"] += len(drafted)
            counts["accepted"] += kept
            counts["rounds"] += bool(drafted)
    return text[len(prompt) :]


def logits(job: dict[str, Any]) -> Any:
    """[2, S, V]."""
    model, (ids,) = CachedGraph(job["draft"]), job["prompts"]
    whole, half = model(ids), len(ids) // 2
    model.cut(half)
    rest = [model([token]) for token in ids[half:]]
    return np.stack([whole, np.concatenate([whole[:half], *rest])])


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    answers: dict[str, Any] = {"version": f"onnxruntime {version('onnxruntime')}"}
    if job.get("logits") is not None:
        np.save(job["logits"], logits(job).astype(np.float32))
    else:
        target = CachedGraph(job["target"])
        draft = None if job["draft"] is None else CachedGraph(job["draft"])
        counts = {"drafted": 0, "accepted": 0, "rounds": 0}
        ids = [continued(prompt, target, draft, job, counts) for prompt in job["prompts"]]
        answers |= {"ids": ids, **counts}
    answer_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
