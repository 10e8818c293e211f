"""Scores of lm-evaluation-harness with a drafter beside those of its own `hf`, on two tasks made
here, so that nothing is fetched: sums of two numbers, by likelihoods (which of four) and in words
(greedy answers), and sentences of a file to repeat. Where the drafter is lossless and the model in
float32, all scores and answers are the same. Needs `pip install lm-eval`.

    python benchmarks/lm_eval_scores.py --target SmolLM2-135M-Instruct --prompts specbench.jsonl \\
        --drafts prompt-lookup,runs/trained/eagle3
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from specctl.api import lm_eval_model  # noqa: F401  # registers the model

NUMBERS = "Question: What is {} + {}?\nAnswer:"
REPEAT = "Repeat the following sentence word by word.\nSentence: {}\nThe same sentence:"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {path}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
"""
CHOICE = """doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
"""
WRITTEN = """generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 64
metric_list:
  - metric: exact_match
"""


def tasks(folder: Path, prompts: Path, count: int) -> list[str]:
    """Three tasks in that folder, by name."""
    draw = random.Random(0)
    choices, sums, repeats = [], [], []
    for _ in range(count):
        one, other = draw.randrange(2, 50), draw.randrange(2, 50)
        right = one + other
        given = [f" {right + off}" for off in draw.sample((-10, -1, 0, 1), 4)]
        question = NUMBERS.format(one, other)
        at = given.index(f" {right}")
        choices.append({"question": question, "choices": given, "answer": at})
        sums.append({"question": question, "answer": f" {right}"})
    lines = map(json.loads, prompts.read_text(encoding="utf-8").splitlines())
    texts = [line["messages"][0]["content"] for line in lines]
    sentences = [one for text in texts for one in text.split(". ") if 40 < len(one) < 160]
    for one in draw.sample([s for s in sentences if "\n" not in s], count):
        repeats.append({"question": REPEAT.format(one), "answer": f" {one}"})
    made = {
        "sums_chosen": ("multiple_choice", choices, CHOICE),
        "sums_written": ("generate_until", sums, WRITTEN),
        "sentences": ("generate_until", repeats, WRITTEN),
    }
    for name, (kind, rows, rest) in made.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        text = TASK.format(name=name, path=path, kind=kind) + rest
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return [*made]


def evaluated(
    model: str, args: dict[str, Any], names: list[str], folder: Path, batch: int
) -> dict[str, Any]:
    """Scores, answers and seconds of one model."""
    began = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model,
        model_args=args,
        tasks=names,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=batch,
        device="cpu",
    )
    answers = [
        sample["resps"] for name in names for sample in found["samples"][name]
    ]  # texts, and likelihoods
    scores = {
        f"{name}: {metric.partition(',')[0]}": value
        for name in names
        for metric, value in found["results"][name].items()
        if isinstance(value, float) and "stderr" not in metric
    }
    seconds = time.perf_counter() - began
    return {
        "scores": scores,
        "answers": answers,
        "seconds": seconds,
        "tau": found["config"].get("tau"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="a folder of transformers")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafts", required=True, help="with commas")
    parser.add_argument("--count", type=int, default=60, help="questions of a task")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--allow", default="", help="as of the model: target+tokenizer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        names = tasks(folder, args.prompts, args.count)
        given = {"pretrained": args.target, "dtype": args.dtype}
        plain = evaluated("hf", given, names, folder, args.batch)
        rows = [("hf", plain)]
        for draft in args.drafts.split(","):
            drafted = {**given, "draft": draft, "allow": args.allow}
            rows.append((draft, evaluated("specctl", drafted, names, folder, args.batch)))
    for name, row in rows:
        scores = ", ".join(f"{task} {score:.3f}" for task, score in row["scores"].items())
        same = sum(a == b for a, b in zip(row["answers"], plain["answers"], strict=True))
        tau = "" if row["tau"] is None else f", tau {row['tau']:.2f}"
        print(f"{name}: {scores}; {same} of {len(plain['answers'])} answers as hf's", end="; ")
        print(f"{row['seconds']:.0f} s{tau}")


if __name__ == "__main__":
    main()
