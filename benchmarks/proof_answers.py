"""Proof that a killed regeneration goes on: no prompt answered twice, none left out.

    PYTHONPATH=src python benchmarks/proof_answers.py --kills 100

A child lets the target answer prompts and is killed with SIGKILL at a random moment, again and
again until it comes to its end. Proved if what was written is never changed and no prompt is
answered twice, no torn record is ever read, and the answers are, prompt by prompt, those of a job
that was never killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from proof_common import Check, checked, parser, report, small_target, start_child, wait

from specctl.runtime.target.target import Target
from specctl.train.data.prompts.answers import AnswerPlan, PromptCut, WrittenAnswer
from specctl.train.data.written.regenerate import regenerate


def job(target: Target, count: int, seed: int) -> tuple[list[PromptCut], AnswerPlan]:
    """So many prompts of their own, and how they are answered."""
    chance = random.Random(seed)
    size = target.spec.vocab_size
    ids = [tuple(chance.choices(range(size), k=chance.randint(2, 8))) for _ in range(count)]
    prompts = [PromptCut(one, "d") for one in ids]
    return prompts, AnswerPlan(count, 8, 16, temperature=0.9, greedy_share=0.5, seed=seed)


def told(answers: Sequence[WrittenAnswer]) -> str:
    return json.dumps([[a.new_ids.tolist(), a.is_greedy, a.finish_reason] for a in answers])


def records(folder: Path) -> bytes:
    """All that is kept, in the order in which it was written."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("answers-*.bin")))


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
        before = records(work)
        child = start_child(body, trace)
        if number < kills:
            time.sleep(chance.uniform(0.0, seconds))
            os.kill(child, signal.SIGKILL)
        code = wait(child)
        is_kept = records(work).startswith(before)
        found.append(None if is_kept else "what was written has changed")
        if code == 0:
            return number, found, end.read_text()
        if code != -signal.SIGKILL:
            found.append(f"exit {code}: {trace.read_text()[-500:]}")
            break
    return number, found, ""


def prove(kills: int, count: int = 40, seed: int = 0) -> list[Check]:
    """At least `kills` kills, over as many jobs as that takes."""
    torch.set_num_threads(1)
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
            whole = records(folder / "work").count(b"SpcA") - number
            made += number
            found += wrong
            ends.append(None if answers == straight else "other answers than without kills")
            ends.append(f"{whole} records of {count}" if whole > count else None)
    killed: list[str | None] = [None] * made
    return [
        checked("kills of a regeneration", killed, kills),
        checked("what was written stays as it is", found, kills),
        checked("every prompt answered once, as without kills", ends),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--prompts", type=int, default=40, help="of each job")
    given = options.parse_args()
    report(prove(given.kills, given.prompts, given.seed), given.json)


if __name__ == "__main__":
    main()
