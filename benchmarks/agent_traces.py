"""Drafting for an agent that writes again what it has written: suffix-decoding and its neighbours.

A task is three requests about one function of a file of prompts (HumanEval, one JSON object with
`messages` a line), each a conversation of its own, as agents without a session send them:

    write    the prompt of the file
    edit     the answer to `write` is quoted; wanted is the whole function with type hints and a
             docstring
    again    the prompt of the file, with one more sentence: "Write the function again, and call it
             once." Nothing is quoted: only a memory of answers can copy

Answers are greedy and of at most --tokens tokens; those of plain decoding are quoted for everybody.
All contenders answer a request in turn, so that a busy machine slows all alike, each with an engine
of its own. `memory` names a tenant: answers of this trace are drafted from as they finish. `once
more` answers the three requests of a task again, with that memory. Speeds are tokens per second of
this process's processor time, prompts included; standard errors are jackknife errors over tasks.
A table is printed after every task.

    python benchmarks/agent_traces.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --prompts humaneval.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specctl import load_drafter, load_target
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import Policy
from specctl.runtime.policies.direct import Direct
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

KINDS = ("write", "edit", "again")
EDIT = (
    "Here is a Python function.\n\n{answer}\n\nWrite the whole function again with type hints and "
    "a docstring of one line. Change nothing else."
)
AGAIN = "\n\nWrite the function again, and call it once."


@dataclass(slots=True)
class Runner:
    """A contender, and what it has answered: (tokens, rounds, seconds) by kind and task."""

    name: str
    engine: Engine
    tenant: str | None = None
    done: dict[str, list[tuple[int, int, float]]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def answer(self, kind: str, tokens: Sequence[int], new_tokens: int) -> tuple[int, ...]:
        request = Request(tuple(tokens), Sampling(max_new_tokens=new_tokens), tenant=self.tenant)
        began = time.process_time()
        found = self.engine.run([request])[0]
        spent = time.process_time() - began
        self.done[kind].append((len(found.tokens), found.stats.rounds, spent))
        self.texts.append(found.tokens)
        return found.tokens


def runners(target: Target, longest: int) -> list[Runner]:
    def made(name: str, draft: str, tenant: str | None = None) -> Runner:
        policy: Policy = Direct(length=16, nodes=16)
        drafter = None if draft == "plain" else load_drafter(draft, target)
        engine = Engine(target, drafter, None if drafter is None else policy)
        engine.open(longest)
        return Runner(name, engine, tenant)

    memory = made("suffix-decoding, memory", "suffix-decoding", "agent")
    return [
        made("plain", "plain"),
        made("prompt-lookup", "prompt-lookup"),
        made("suffix-automaton", "suffix-automaton"),
        made("suffix-decoding", "suffix-decoding"),
        memory,
        Runner("suffix-decoding, once more", memory.engine, memory.tenant),
    ]


def jackknife(rows: Sequence[Any], ratio: Callable[[Sequence[Any]], float]) -> tuple[float, float]:
    """A ratio of sums, and its standard error, leaving one task out in turn."""
    n, whole = len(rows), ratio(rows)
    if n < 2:
        return whole, math.nan
    parts = [ratio([*rows[:i], *rows[i + 1 :]]) for i in range(n)]
    mean = sum(parts) / n
    return whole, math.sqrt((n - 1) / n * sum((part - mean) ** 2 for part in parts))


def tau(rows: Sequence[tuple[int, int, float]]) -> float:
    return sum(row[0] for row in rows) / sum(row[1] for row in rows)


def speedup(pairs: Sequence[Any]) -> float:
    """Of (contender, plain): tokens per second over tokens per second."""
    ours, plain = zip(*pairs, strict=True)
    pace = sum(row[0] for row in ours) / sum(row[2] for row in ours)
    return pace * sum(row[2] for row in plain) / sum(row[0] for row in plain)


def task(target: Target, found: list[Runner], prompt: str, new_tokens: int) -> None:
    """The requests of one task, answered by all; the first contender's answer is quoted. Then once
    more by the last contender, as a runner of its own."""
    *first, memory, second = found
    requests: list[tuple[str, list[int]]] = []

    def all_answer(kind: str, text: str) -> str:
        ids = target.encode_chat([{"role": "user", "content": text}])
        requests.append((kind, ids))
        said = [runner.answer(kind, ids, new_tokens) for runner in (*first, memory)]
        return target.decode([i for i in said[0] if i not in target.eos_ids])

    answer = all_answer("write", prompt)
    all_answer("edit", EDIT.format(answer=answer))
    all_answer("again", prompt + AGAIN)
    for kind, ids in requests:
        second.answer(kind, ids, new_tokens)


def by_task(runner: Runner) -> list[tuple[int, int, float]]:
    """Tokens, rounds and seconds of each task."""
    return [
        (sum(r[0] for r in rows), sum(r[1] for r in rows), sum(r[2] for r in rows))
        for rows in zip(*(runner.done[kind] for kind in KINDS), strict=True)
    ]


def report(runner: Runner, plain: Runner) -> str:
    """Tau by kind of request, tau and speed of all with their errors, and texts like plain's."""
    whole, against = by_task(runner), by_task(plain)
    cells = [jackknife(runner.done[kind], tau) for kind in KINDS]
    cells += [jackknife(whole, tau), jackknife(list(zip(whole, against, strict=True)), speedup)]
    same = sum(a == b for a, b in zip(runner.texts, plain.texts, strict=True))
    shown = " | ".join(f"{value:.2f} ± {error:.2f}" for value, error in cells)
    pace = sum(row[0] for row in whole) / sum(row[2] for row in whole)
    return f"| {runner.name} | {shown} | {pace:.0f} | {same} of {len(plain.texts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    words = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(words.target)
    lines = words.prompts.read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // words.tasks)
    prompts = [json.loads(line)["messages"][0]["content"] for line in lines[::step]][: words.tasks]
    found = runners(target, 1024)
    for number, prompt in enumerate(prompts):
        task(target, found, prompt, words.tokens)
        print(f"{number + 1} of {len(prompts)} tasks")
        print("| drafter | write | edit | again | tau | speed | tokens/s | same texts |")
        for runner in found:
            print(report(runner, found[0]), flush=True)


if __name__ == "__main__":
    main()
