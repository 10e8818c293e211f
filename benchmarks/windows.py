"""Tokens a round by the length of the context, of drafters with and without a window.

A prompt is so many texts of a file behind one another, of questions of one category (one JSON
object with `category` and `messages` a line), the last of which is to be summarised. Every drafter
answers all prompts greedily in chains. tau +- standard error over prompts, and the difference from
the first drafter's, paired over prompts. Options behind a folder replace those of its package, as
the flag `--draft-option` does.

    python benchmarks/windows.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --prompts specbench.jsonl \\
        --drafts runs/trained/eagle3,runs/trained/eagle3:window=256:sink=4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import torch

from specctl import load_target
from specctl.api.drafting import load_draft
from specctl.core.drafter import Drafter
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

ORDER = "Summarize: "
LAST = "Summarize the last of these articles in three sentences.\n\n"


def prompts(target: Target, path: Path, category: str, texts: int, count: int) -> list[list[int]]:
    """The first `count` groups of so many texts, as questions to a chat model."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    asked = [line["messages"][0]["content"] for line in lines if line["category"] == category]
    bodies = [text.removeprefix(ORDER) for text in asked]
    groups = [bodies[at * texts : (at + 1) * texts] for at in range(count)]
    return [
        target.encode_chat([{"role": "user", "content": LAST + "\n\n".join(group)}])
        for group in groups
        if len(group) == texts
    ]


def taus(
    target: Target, drafter: Drafter, length: int, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Of each prompt tokens a round, and what was written."""
    engine = Engine(target, drafter, Chain(length=length))
    sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0)
    engine.open(max(map(len, prompts)) + new_tokens)
    found, texts = [], []
    for index, prompt in enumerate(prompts):
        engine.submit(index, Request(tuple(prompt), sampling))
        text, rounds = list[int](), 0
        while engine.is_busy:
            for emission in engine.step():
                text.extend(emission.tokens)
                rounds = emission.row.stats.rounds
        found.append(len(text) / rounds)
        texts.append(tuple(text))
    return found, texts


def cell(values: Sequence[float]) -> str:
    return f"{mean(values):.2f} +- {stdev(values) / len(values) ** 0.5:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--category", default="summarization")
    parser.add_argument("--texts", default="1:8,2:8,4:6,8:4", help="texts of a prompt:prompts")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--length", type=int, default=5)
    words = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(words.target)
    names = words.drafts.split(",")
    print(f"| texts | tokens of the prompt | {' | '.join(names)} |")
    for part in words.texts.split(","):
        texts, count = map(int, part.split(":"))
        given = prompts(target, words.prompts, words.category, texts, count)
        cells, first, exact = [], list[float](), None
        for name in names:
            folder, *options = name.split(":")
            drafter = load_draft(folder, target, draft_options=options).drafter
            assert drafter is not None
            values, written = taus(target, drafter, words.length, given, words.tokens)
            exact = exact or written
            note = "" if written == exact else ", other texts"
            apart = [value - one for value, one in zip(values, first, strict=True)] if first else []
            cells.append(cell(values) + (f" ({cell(apart)})" if apart else "") + note)
            first = first or values
        tokens = f"{min(map(len, given)):,}-{max(map(len, given)):,}"
        print(f"| {texts} | {tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
