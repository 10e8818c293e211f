"""Proof T3: a run stopped anywhere and resumed is, bit for bit, the run that was never stopped.

    PYTHONPATH=src python benchmarks/proof_resume.py --cuts 200
    PYTHONPATH=src python benchmarks/proof_resume.py --kinds eagle3 --cuts 20

For each kind of run (see KINDS in proof_common.py) a run is cut at random steps, each time in one
of three ways: asked to stop, ended by an error in the middle of a step, or ended while it measures.
Every part runs in a process of its own whose random generators begin elsewhere. Compared with an
uninterrupted run at every checkpoint and at the end: weights, optimizer state, random generators,
position, the next 50 batches, the learning rates and figures in the log, the best tau.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from proof_common import (
    KINDS,
    Check,
    checked,
    logged,
    parser,
    report,
    small_recipe,
    small_target,
    start_child,
    state_digest,
    wait,
    write_text,
)

from specctl.core.batch import TrainBatch
from specctl.core.errors import Exit
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train import loop as loop_module
from specctl.train import run as run_module
from specctl.train.loop import Job
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.state import seed_everything

STEPS, AHEAD = 40, 50
WAYS = ("stop", "error", "measure")


class Cut(Exception):
    """The part ends here, as if the power had gone."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a run: it begins with its own random numbers, notes a digest of every state
    it saves, and ends in one of WAYS at batch number `at` (None: at the end of the run)."""

    recipe: Recipe
    out: Path
    target: Target
    seed: int
    way: str = "stop"
    at: int | None = None

    def __call__(self) -> None:
        seed_everything(self.seed)
        notes = self.out.with_suffix(".notes").open("a")
        save, measure, build = Checkpoints.save, loop_module.measure, run_module.make_job
        jobs: list[Job] = []

        def building(*given: Any, **named: Any) -> Job:
            job = build(*given, **named)
            jobs.append(replace(job, batch=lambda rows: counted(job, rows)))
            return jobs[0]

        def noting(self: Checkpoints, snapshot: Snapshot, *rest: Any) -> Path:
            position = snapshot.scalars["progress"]["position"]
            job = jobs[0]
            ahead = job.order.take(position, AHEAD * job.settings.rows)
            line = [snapshot.step, state_digest(snapshot), ahead]
            notes.write(json.dumps(line) + "\n")
            notes.flush()
            return save(self, snapshot, *rest)

        seen = [0]

        def counted(job: Job, rows: list[int]) -> TrainBatch:
            seen[0] += 1
            if seen[0] == self.at and self.way == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if seen[0] == self.at and self.way == "error":
                raise Cut
            return job.batch(rows)

        def measuring(job: Job) -> Any:
            found = measure(job)
            if self.way == "measure" and self.at is not None and seen[0] >= self.at:
                raise Cut
            return found

        Checkpoints.save = noting  # type: ignore[method-assign]
        run_module.make_job, loop_module.measure = building, measuring
        result = train_draft(self.recipe, self.out, target=self.target)
        ending = {"steps": result.steps, "tau": result.tau, "best": str(result.best_checkpoint)}
        self.out.with_suffix(".end").write_text(json.dumps(ending))


def states(out: Path) -> dict[int, set[str]]:
    """Step -> the states that were saved there (one, if all is well)."""
    found: dict[int, set[str]] = {}
    for line in out.with_suffix(".notes").read_text().splitlines():
        found.setdefault(json.loads(line)[0], set()).add(line)
    return found


def ending(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.with_suffix(".end").read_text())
    return found | {"best": Path(found["best"]).name}


def cut_run(recipe: Recipe, out: Path, target: Target, chance: random.Random, cuts: int) -> int:
    """Run to the end with so many cuts; returns how many there really were."""
    made = 0
    trace = out.with_suffix(".trace")
    for number in range(10 * cuts):
        is_last = made >= cuts
        at = None if is_last else chance.randint(1, max(2, 2 * STEPS // (cuts + 1)))
        way = WAYS[number % len(WAYS)]
        part = Part(recipe, out, target, chance.randrange(2**31), way, at)
        code = wait(start_child(part, trace))
        if code == Exit.OK:
            return made
        if code != (Exit.INTERRUPTED if way == "stop" else Exit.BUG) or (
            code == Exit.BUG and "Cut" not in trace.read_text()[-40:]
        ):
            raise AssertionError(f"exit {code}: {trace.read_text()[-2000:]}")
        made += 1
    raise AssertionError(f"not finished after {made} cuts")


def prove_kind(kind: str, cuts: int, seed: int, each: int = 8) -> list[Check]:
    """`cuts` cuts of runs of one kind, at most `each` of them in one run."""
    chance = random.Random(f"{kind} {seed}")
    different: list[str | None] = []
    odd_ends: list[str | None] = []
    made = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, text = small_target(), write_text(folder / "text.txt", seed)
        sets = {"train__steps": STEPS, "train__tau_every": 5}
        recipe = small_recipe(kind, text, **sets, train__save_every=3, train__keep=STEPS)
        every = small_recipe(kind, text, **sets, train__save_every=1)
        whole = folder / "whole"
        code = wait(start_child(Part(every, whole, target, 1), whole.with_suffix(".trace")))
        assert code == 0, whole.with_suffix(".trace").read_text()
        straight = states(whole)
        for number in range(10 * cuts):
            if made >= cuts:
                break
            out = folder / f"cut{number}"
            made += cut_run(recipe, out, target, chance, min(each, cuts - made))
            found = states(out)
            different += [
                None if saved == straight.get(step) else f"{out.name}, step {step}"
                for step, saved in sorted(found.items())
            ]
            lines = zip_longest(logged(out), logged(whole))
            odd_ends += [None if a == b else f"{a} instead of {b}" for a, b in lines]
            ends = ending(out), ending(whole)
            odd_ends.append(None if ends[0] == ends[1] else f"{ends[0]} instead of {ends[1]}")
    cut: list[str | None] = [None] * made
    return [
        checked(f"{kind}: cuts, each resumed", cut, cuts),
        checked(f"{kind}: states and next {AHEAD} batches bitwise", different, 5),
        checked(f"{kind}: log lines, best tau and checkpoint", odd_ends, STEPS),
    ]


def prove(kinds: Sequence[str], cuts: int, seed: int = 0, each: int = 8) -> list[Check]:
    """`cuts` cuts, shared among the kinds."""
    torch.set_num_threads(1)
    share = [cuts // len(kinds) + (i < cuts % len(kinds)) for i in range(len(kinds))]
    pairs = zip(kinds, share, strict=True)
    return [check for kind, count in pairs for check in prove_kind(kind, count, seed, each)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cuts", type=int, default=200, help="over all kinds together")
    options.add_argument("--kinds", default=",".join(KINDS))
    given = options.parse_args()
    report(prove(given.kinds.split(","), given.cuts, given.seed), given.json)


if __name__ == "__main__":
    main()
