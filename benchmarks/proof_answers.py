"""Proof that a killed regeneration goes on: no prompt answered twice, none left out.

    PYTHONPATH=src python benchmarks/proof_answers.py --kills 100

A child lets the target answer prompts and is killed with SIGKILL at a random moment, again and
again until it comes to its end. Proved if no finished shard is ever written again, no half-written
one is ever read, and the answers are, prompt by prompt, those of a job that was never killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch
from proof_common import Check, checked, parser, report, small_target, start_child, wait

from specctl.runtime.target.target import Target
from specctl.train.data import regenerate as module
from specctl.train.data.regenerate import AnswerPlan, PromptCut, WrittenAnswer, regenerate

SHARD = 4


def job(target: Target, count: int, seed: int) -> tuple[list[PromptCut], AnswerPlan]:
    """So many prompts of their own, and how they are answered."""
    chance = random.Random(seed)
    size = target.spec.vocab_size
    ids = [tuple(chance.choices(range(size), k=chance.randint(2, 8))) for _ in range(count)]
    prompts = [PromptCut(one, "d") for one in ids]
    return prompts, AnswerPlan(count, 8, 16, temperature=0.9, greedy_share=0.5, seed=seed)


def told(answers: Sequence[WrittenAnswer]) -> str:
    return json.dumps([asdict(answer) for answer in answers])


def stamps(folder: Path) -> dict[str, int]:
    """Finished shard -> its inode: a file that was written again has another."""
    return {
        str(p.relative_to(folder)): p.stat().st_ino for p in folder.rglob("shard-*.safetensors")
    }


def killed_job(
    folder: Path, target: Target, count: int, kills: int, chance: random.Random, seconds: float
) -> tuple[int, list[str | None], str]:
    """Answer with kills; returns how many there were, what was wrong after each, the answers."""
    prompts, plan = job(target, count, seed=count)
    end, trace = folder / "answers.json", folder / "trace"
    work = folder / "work"

    def body() -> None:
        end.write_text(told(regenerate(target, prompts, plan, work, batch=3)))

    found: list[str | None] = []
    for number in range(10_000):
        before = stamps(work)
        child = start_child(body, trace)
        if number < kills:
            time.sleep(chance.uniform(0.0, seconds))
            os.kill(child, signal.SIGKILL)
        code = wait(child)
        again = [name for name, inode in before.items() if stamps(work).get(name) != inode]
        found.append(f"written again: {again}" if again else None)
        if code == 0:
            return number, found, end.read_text()
        if code != -signal.SIGKILL:
            found.append(f"exit {code}: {trace.read_text()[-500:]}")
            break
    return number, found, ""


def prove(kills: int, count: int = 40, seed: int = 0) -> list[Check]:
    """At least `kills` kills, over as many jobs as that takes."""
    torch.set_num_threads(1)
    with patch.object(module, "SHARD", SHARD):  # forked children have it too
        return _prove(kills, count, seed)


def _prove(kills: int, count: int, seed: int) -> list[Check]:
    chance, target = random.Random(seed), small_target()
    made, found, ends = 0, list[str | None](), list[str | None]()
    while made < kills:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prompts, plan = job(target, count, seed=count)
            began = time.monotonic()
            straight = told(regenerate(target, prompts, plan, folder / "whole", batch=5))
            seconds = 0.5 * (time.monotonic() - began)
            number, wrong, answers = killed_job(
                folder, target, count, kills - made, chance, seconds
            )
            left = [p.name for p in (folder / "work").rglob(".*.tmp")]
            made += number
            found += wrong
            ends.append(None if answers == straight else "other answers than without kills")
            ends.append(f"left over: {left}" if left else None)
    killed: list[str | None] = [None] * made
    return [
        checked("kills of a regeneration", killed, kills),
        checked("finished shards stay as they are", found, kills),
        checked("every prompt answered once, as without kills", ends),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--prompts", type=int, default=40, help="of each job, in shards of 4")
    given = options.parse_args()
    report(prove(given.kills, given.prompts, given.seed), given.json)


if __name__ == "__main__":
    main()
