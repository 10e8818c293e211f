"""Proofs T1 and T7: end a training run at random moments; nothing acknowledged may be lost.

    PYTHONPATH=src python benchmarks/proof_kill.py --kills 500 --json
    PYTHONPATH=src python benchmarks/proof_kill.py --kills 100 --signal term

A child process trains a real drafter with `train_draft`, saves after every step and notes each save
that returned, with a hash of all of its state (weights, optimizer, random generators, position).
The parent kills it at a uniformly random moment and starts the same command again. Proved if: the
last acknowledged checkpoint is whole after every kill, every resume continues at or after it, no
resume fails, and every state ever acknowledged is the one an uninterrupted run passes through. With
`--signal term` the child must besides save the step in hand by itself and exit with code 75 within
30 seconds. SIGKILL does not test power loss; proof_faults.py checks the order of fsync and rename.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from specctl.core.errors import Exit
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.integrity import damage, saved_steps, step_name
from specctl.train.stop import Stop

GRACE = 30.0  # seconds that a process gets between SIGTERM and SIGKILL where jobs are scheduled
FROM = "continuing from step "


class Trainer:
    """Starts children that train in `out` and note what they were promised. One per run folder."""

    def __init__(self, out: Path, kind: str, target: Target, text: Path) -> None:
        self.out, self.target, self.acks = out, target, out.with_suffix(".acks")
        self.recipe = small_recipe(kind, text)

    def start(self, until: int | None = None) -> int:
        """Fork a child; it ends by itself once step `until` is saved. Until it listens to SIGTERM,
        the signal waits, as it does before a program has begun."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        child = start_child(lambda: self._train(until), self.out.with_suffix(".failed"))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return child

    def _train(self, until: int | None) -> None:
        notes = os.open(self.acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        save = Checkpoints.save

        def noted(self: Checkpoints, snapshot: Snapshot, *rest: Any) -> Path:
            path = save(self, snapshot, *rest)
            os.write(notes, f"{snapshot.step} {state_digest(snapshot)}\n".encode())
            if until is not None and snapshot.step >= until:
                os._exit(0)
            return path

        class Resumes(SilentReporter):
            def say(self, text: str) -> None:
                if text.startswith(FROM):
                    step = text.removeprefix(FROM).replace(",", "")
                    os.write(notes, f"resumed {step}\n".encode())

        listening = Stop.listening

        @contextmanager
        def heard(stop: Stop) -> Iterator[Stop]:
            with listening(stop) as found:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                yield found

        Checkpoints.save = noted  # type: ignore[method-assign]
        Stop.listening = heard  # type: ignore[method-assign]
        train_draft(self.recipe, self.out, target=self.target, reporter=Resumes())

    def notes(self) -> list[list[str]]:
        if not self.acks.exists():
            return []
        return [line.split() for line in self.acks.read_text().splitlines()]


def acknowledged(notes: list[list[str]]) -> dict[int, set[str]]:
    """Step -> hashes of the states that were acknowledged for it."""
    found: dict[int, set[str]] = {}
    for first, second in notes:
        if first != "resumed":
            found.setdefault(int(first), set()).add(second)
    return found


def wrong_resumes(notes: list[list[str]]) -> list[str | None]:
    """Per resume, whether it began before the last step acknowledged until then."""
    last, found = 0, list[str | None]()
    for first, second in notes:
        if first == "resumed":
            is_late = int(second) < last
            found.append(f"resumed at {second}, {last} was acknowledged" if is_late else None)
        else:
            last = max(last, int(first))
    return found


@dataclass(frozen=True, slots=True)
class Ended:
    """How one child ended. `mid_save`: it left a half-written checkpoint of its own, or one that
    stands but was not acknowledged yet."""

    mid_save: bool
    lost: str | None
    failed: str | None
    seconds: float


def traces(folder: Path) -> set[tuple[str, int]]:
    """What lies in the checkpoints' folder, told apart from what later has the same name."""
    return {(p.name, p.lstat().st_ino) for p in folder.glob("*")}


def end_once(trainer: Trainer, seconds: float, number: signal.Signals) -> Ended:
    """Start a child, wait, end it, look at what it left."""
    folder = trainer.out / "checkpoints"
    before = traces(folder)
    expected = int(Exit.INTERRUPTED) if number == signal.SIGTERM else -number
    child = trainer.start()
    time.sleep(seconds)
    os.kill(child, number)
    sent = time.monotonic()
    code = wait(child)
    took = time.monotonic() - sent
    last = max(acknowledged(trainer.notes()), default=0)
    fresh = {name for name, _ in traces(folder) - before}
    steps = saved_steps(folder)
    is_ahead = bool(steps) and steps[-1] > last and step_name(steps[-1]) in fresh
    mid_save = is_ahead or any(name.startswith(".tmp-step") for name in fresh)
    wrong = loss(folder, steps, last)
    failed = None if code == expected and took < GRACE else f"exit {code} after {took:.1f} s"
    if failed is not None and (trace := trainer.out.with_suffix(".failed")).exists():
        failed += f": {trace.read_text()[-300:]}"
    return Ended(mid_save, wrong, failed, took)


def loss(folder: Path, steps: Sequence[int], last: int) -> str | None:
    """What is wrong with what stands at or after step `last`, which was acknowledged. The step
    itself may have gone: where several children were killed between a save and its word, newer
    ones have taken its place."""
    held = [step for step in steps if step >= last]
    if last and not held:
        return f"step {last} was acknowledged, nothing at or after it is left"
    damages = ((step, damage(folder / step_name(step))) for step in held)
    return next((f"step {step}: {wrong}" for step, wrong in damages if wrong), None)


def count(ends: Sequence[Ended]) -> int:
    """How many of them fell into a save."""
    return sum(end.mid_save for end in ends)


def seconds_to_first_save(trainer: Trainer) -> float:
    """How long a child takes from its start until a save has returned."""
    began = time.monotonic()
    wait(trainer.start(until=1))
    return time.monotonic() - began


def prove(
    kills: int,
    kind: str = "medusa",
    seed: int = 0,
    number: signal.Signals = signal.SIGKILL,
    mid_saves: int = 0,
) -> Sequence[Check]:
    """End a run at least `kills` times, then compare all it acknowledged with an uninterrupted run.
    It goes on, at most three times as long, until `mid_saves` ends fell into a save."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = write_text(folder / "text.txt", seed)
        trainer = Trainer(folder / "run", kind, small_target(), text)
        longest = 2.0 * seconds_to_first_save(trainer)
        ends: list[Ended] = []
        while len(ends) < kills or (len(ends) < 3 * kills and count(ends) < mid_saves):
            ends.append(end_once(trainer, chance.uniform(0.0, longest), number))
        notes = trainer.notes()
        states = acknowledged(notes)
        whole = Trainer(folder / "whole", kind, trainer.target, text)
        code = wait(whole.start(until=max(states, default=1)))
        assert code == 0, folder.joinpath("whole.failed").read_text()
        straight, last = acknowledged(whole.notes()), max(states, default=0)
        logs = logged(trainer.out, last), logged(whole.out, last)
        different = [
            None if digests == straight.get(step) else f"step {step}"
            for step, digests in sorted(states.items())
        ]
    odd_lines = [
        None if mine == theirs else f"{mine} instead of {theirs}"
        for mine, theirs in zip_longest(*logs)
    ]
    name = f"{kind}, SIG{'TERM' if number == signal.SIGTERM else 'KILL'}"
    mid_save: list[str | None] = [None] * count(ends)
    in_save = checked(f"{name}: of these in the middle of a save", mid_save, mid_saves)
    return [
        checked(f"{name}: acknowledged checkpoint, or newer, whole", [e.lost for e in ends], kills),
        *([in_save] if number == signal.SIGKILL else []),
        checked(f"{name}: expected exit code", [e.failed for e in ends], kills),
        checked(f"{name}: resumed at or after it", wrong_resumes(notes)),
        checked(f"{name}: states as of an uninterrupted run", different, 2),
        checked(f"{name}: log lines as of an uninterrupted run", odd_lines, 2),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--mid-saves", type=int, default=0, help="least number to count as proved")
    options.add_argument("--kind", choices=KINDS, default="medusa", help="what is trained")
    options.add_argument("--signal", choices=("kill", "term"), default="kill")
    given = options.parse_args()
    number = signal.SIGKILL if given.signal == "kill" else signal.SIGTERM
    report(prove(given.kills, given.kind, given.seed, number, given.mid_saves), given.json)


if __name__ == "__main__":
    main()
