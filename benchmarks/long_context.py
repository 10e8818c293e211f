"""Tokens a round by the length of the context: windows of feature-level drafters, and draft models
that read a part of the prompt.

A prompt is so many texts of a file behind one another, of questions of one category (one JSON
object with `category` and `messages` a line), one of which, named by its first words, is to be
summarised. Every drafter answers all prompts greedily in chains. tau +- standard error over
prompts, milliseconds of processor time a token behind the first, and the difference of tau from the
first drafter's, paired over prompts. What stands behind a draft's name are `drafter.options`, and
`none` decodes plainly. With `--newest` a shortened prompt has its newest pieces in place of those
that fit the question.

    python benchmarks/long_context.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --prompts specbench.jsonl \\
        --drafts runs/trained/eagle3,runs/trained/eagle3:window=256:sink=4
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

import torch

from specctl import load_target
from specctl.api.arguments.drafting import load_draft
from specctl.core.drafter import Drafter
from specctl.drafters.states import short_context
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

ORDER = "Summarize: "
QUESTION = "Summarize in three sentences the one of these articles that begins: {}"
NAMED_BY = 12  # words


def prompts(target: Target, path: Path, category: str, texts: int, count: int) -> list[list[int]]:
    """The first `count` groups of so many texts, as questions to a chat model about one of them."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    given = [line["messages"][0]["content"] for line in lines if line["category"] == category]
    bodies = [text.removeprefix(ORDER) for text in given]
    groups = [bodies[at * texts : (at + 1) * texts] for at in range(count)]
    choice, found = random.Random(0), []
    for group in groups:
        beginning = " ".join(choice.choice(group).split()[:NAMED_BY])
        content = "\n\n".join((*group, QUESTION.format(beginning)))
        found.append(target.encode_chat([{"role": "user", "content": content}]))
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """What was written, tokens a round, and seconds a token behind the first."""

    text: tuple[int, ...]
    tau: float
    seconds: float


def answers(
    target: Target,
    drafter: Drafter | None,
    length: int,
    prompts: Sequence[list[int]],
    new_tokens: int,
) -> list[Answer]:
    engine = Engine(target, drafter, None if drafter is None else Chain(length=length))
    sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0)
    engine.open(max(map(len, prompts)) + new_tokens)
    found = []
    for index, prompt in enumerate(prompts):
        engine.submit(index, Request(tuple(prompt), sampling))
        text, rounds, began, first = list[int](), 0, 0.0, 0
        while engine.is_busy:
            for emission in engine.step():
                text.extend(emission.tokens)
                rounds = emission.row.stats.rounds
                if not first:
                    began, first = time.process_time(), len(text)
        seconds = (time.process_time() - began) / max(1, len(text) - first)
        found.append(Answer(tuple(text), len(text) / max(1, rounds), seconds))
    return found


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
    parser.add_argument("--newest", action="store_true")
    words = parser.parse_args()
    if words.newest:
        short_context.bm25 = lambda question, pieces: list(range(len(pieces)))
    torch.set_num_threads(1)
    target = load_target(words.target)
    names = words.drafts.split(",")
    print(f"| texts | tokens of the prompt | {' | '.join(names)} |")
    for part in words.texts.split(","):
        texts, count = map(int, part.split(":"))
        given = prompts(target, words.prompts, words.category, texts, count)
        cells, first = [], list[Answer]()
        for name in names:
            folder, *options = name.split(":")
            drafter = load_draft(folder, target, draft_options=options).drafter
            own = answers(target, drafter, words.length, given, words.tokens)
            apart = [one.tau - other.tau for one, other in zip(own, first, strict=False)]
            same = all(one.text == other.text for one, other in zip(own, first, strict=False))
            cells.append(
                cell([one.tau for one in own])
                + f", {1000 * median(one.seconds for one in own):.1f} ms"
                + (f" ({cell(apart)})" if apart else "")
                + ("" if same else ", other texts")
            )
            first = first or own
        tokens = f"{min(map(len, given)):,}-{max(map(len, given)):,}"
        print(f"| {texts} | {tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
