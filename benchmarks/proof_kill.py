"""Proofs T1 and T7: end a training run at random moments; nothing acknowledged may be lost.

    PYTHONPATH=src python benchmarks/proof_kill.py --kills 500 --json
    PYTHONPATH=src python benchmarks/proof_kill.py --kills 100 --signal term

A child process trains a real drafter with `train_draft`, saves after every step and notes each save
that returned, with a hash of all of its state (weights, optimizer, random generators, position).
The parent kills it at a uniformly random moment and starts the same command again. Proved if: the
last acknowledged checkpoint is whole after every kill, every resume continues at or after it, no
resume fails, and every state ever acknowledged is the one an uninterrupted run passes through. With
`--signal term` the child must besides save the step in hand by itself and exit with code 75.
SIGKILL does not test power loss; the order of fsync and rename is checked by the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specctl.recipes.errors import Exit
from specctl.recipes.load import load_recipe
from specctl.runtime.report import SilentReporter
from specctl.runtime.target import Target
from specctl.train.checkpoint import Checkpoints, Snapshot
from specctl.train.run import train_draft
from specctl.train.stop import Interrupted
from specctl.train.whole import damage

LETTERS = "abcdefghijklmnopqrstuvwxyz ()=:\n"
SETS = (
    "data.prompts=32", "data.new_tokens=12", "data.prompt_tokens=6", "data.regenerate=false",
    "data.format=text", "train.steps=1000000", "train.rows=2", "train.seq_len=16",
    "train.save_every=1", "train.tau_every=7", "train.tau_prompts=1", "train.tau_tokens=4",
    "train.log_every=1", "train.schedule=linear", "train.learning_rate=1e-3", "vocab.size=null",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Proof:
    """What was done and what was found; `ok` if nothing was lost, torn or different."""

    kills: int
    mid_save: int
    acknowledged: int
    last_step: int
    lost: int
    failed_resumes: int
    different: int
    compared: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.lost == self.failed_resumes == self.different == 0 < self.compared


def small_target() -> Target:
    """A random model of 32 letters."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ")
    return Target.from_model(LlamaForCausalLM(config), fast)


def state_digest(snapshot: Snapshot) -> str:
    """sha256 over everything that decides how the run goes on."""
    body = hashlib.sha256()
    parts = {**snapshot.tensors, "own": snapshot.own}
    for part, tensors in sorted(parts.items()):
        for name, tensor in sorted(tensors.items()):
            body.update(f"{part}/{name}".encode())
            body.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    progress = snapshot.scalars["progress"]
    body.update(f"{progress['step']} {progress['position']} {progress['best_step']}".encode())
    return body.hexdigest()


class Trainer:
    """Starts children that train in `out` and note what they were promised. One per run folder."""

    def __init__(self, out: Path, family: str, target: Target, text: Path) -> None:
        self.out, self.target, self.acks = out, target, out.with_suffix(".acks")
        self.recipe = load_recipe(family, sets=[*SETS, f"data.source={text}"])

    def start(self, until: int | None = None) -> int:
        """Fork a child; it ends by itself once step `until` is saved."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            return child
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(Exit.INTERRUPTED))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            self._train(until)
        except Interrupted:
            os._exit(Exit.INTERRUPTED)
        except BaseException:
            self.out.with_suffix(".failed").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)

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
                if text.startswith("continuing from step "):
                    step = text.removeprefix("continuing from step ").replace(",", "")
                    os.write(notes, f"resumed {step}\n".encode())

        Checkpoints.save = noted  # type: ignore[method-assign]
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


def wrong_resumes(notes: list[list[str]]) -> int:
    """Resumes that began before the last step acknowledged until then."""
    last = wrong = 0
    for first, second in notes:
        if first == "resumed":
            wrong += int(second) < last
        else:
            last = max(last, int(first))
    return wrong


def end_once(trainer: Trainer, seconds: float, number: signal.Signals) -> tuple[bool, bool, bool]:
    """Start, wait, end. Returns: was in the middle of a save, lost something, child had failed."""
    expected = int(Exit.INTERRUPTED) if number == signal.SIGTERM else -number
    child = trainer.start()
    time.sleep(seconds)
    os.kill(child, number)
    failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != expected
    folder = trainer.out / "checkpoints"
    steps = Checkpoints(folder, SilentReporter()).steps()
    last = max(acknowledged(trainer.notes()), default=0)
    unacknowledged = bool(steps) and steps[-1] > last
    mid_save = unacknowledged or any(folder.glob(".tmp-*"))
    lost = last > 0 and damage(folder / f"step{last:06d}") is not None
    return mid_save, lost, failed


def seconds_to_first_save(trainer: Trainer) -> float:
    """How long a child takes from its start until a save has returned."""
    began = time.monotonic()
    os.waitpid(trainer.start(until=1), 0)
    return time.monotonic() - began


def prove(
    kills: int,
    family: str = "medusa",
    seed: int = 0,
    number: signal.Signals = signal.SIGKILL,
) -> Proof:
    """End a run `kills` times, then compare all it acknowledged with an uninterrupted run."""
    torch.set_num_threads(1)
    began, chance = time.monotonic(), random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = folder / "text.txt"
        lines = ["".join(chance.choices(LETTERS[:26], k=24)) for _ in range(60)]
        text.write_text("\n\n".join(lines))
        trainer = Trainer(folder / "run", family, small_target(), text)
        longest = 2.0 * seconds_to_first_save(trainer)
        seen = [end_once(trainer, chance.uniform(0.0, longest), number) for _ in range(kills)]
        notes = trainer.notes()
        states = acknowledged(notes)
        whole = Trainer(folder / "whole", family, trainer.target, text)
        status = os.waitpid(whole.start(until=max(states, default=1)), 0)[1]
        assert status == 0, folder.joinpath("whole.failed").read_text()
        straight = acknowledged(whole.notes())
        different = sum(digests != straight.get(step) for step, digests in states.items())
        return Proof(
            kills=kills,
            mid_save=sum(mid for mid, _, _ in seen),
            acknowledged=len(states),
            last_step=max(states, default=0),
            lost=sum(lost for _, lost, _ in seen) + wrong_resumes(notes),
            failed_resumes=sum(failed for _, _, failed in seen),
            different=different,
            compared=len(states),
            seconds=round(time.monotonic() - began, 1),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--family", default="medusa", help="recipe of the drafter that is trained")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", choices=("kill", "term"), default="kill")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    number = signal.SIGKILL if options.signal == "kill" else signal.SIGTERM
    proof = prove(options.kills, options.family, options.seed, number)
    result = asdict(proof) | {"ok": proof.ok, "family": options.family, "signal": options.signal}
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{proof.kills} times SIG{options.signal.upper()}, {proof.mid_save} in the middle of a "
            "save: "
            f"{proof.lost} acknowledged checkpoints lost, {proof.failed_resumes} failed resumes, "
            f"{proof.different} of {proof.compared} acknowledged states differ from those of an "
            f"uninterrupted run ({proof.seconds:.0f} s)"
        )
    sys.exit(Exit.OK if proof.ok else Exit.GATE)


if __name__ == "__main__":
    main()
