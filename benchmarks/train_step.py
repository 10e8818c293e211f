"""Where the seconds of a training step go, and what they were in another checkout.

    python benchmarks/train_step.py --recipe eagle3 --against ../before
    python benchmarks/train_step.py --recipe distill --threads 2 --ways --neighbours 1 --steps 30

A process per checkout; they take turns, step by step, so that both meet the same machine. Times are
medians: `target` reads the batch, `loss` runs the drafter and its head (whose gradient is taken in
the same pass), `backward` the rest of it, `update` the optimizer. Ids are random: time is all that
is measured. The first losses must agree. `--ways` compares one thread, all of `--threads` and as
many as training finds faster (train/step/step_threads.py); give `--steps 30`: it needs a few.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pairs import busy_neighbours

HERE = Path(__file__).resolve().parents[1]
PARTS = ("target", "loss", "backward", "update")


def batch_of(args: argparse.Namespace, vocab_size: int) -> Any:
    """Rows of random documents of `--document` tokens."""
    import torch

    from specctl.core.batch import TrainBatch

    shape = args.rows, args.seq_len
    at = torch.arange(args.seq_len).expand(shape)
    ids = torch.randint(0, vocab_size, shape)
    number, position = at // args.document, at % args.document
    return TrainBatch(ids, torch.ones(shape, dtype=torch.bool), number, position)


def work(args: argparse.Namespace) -> None:
    """A step for each line of standard input; its seconds by part, as a line."""
    import torch

    from specctl.core.vocab import VocabMap
    from specctl.recipes.load import load_recipe
    from specctl.runtime.target.target import load_target
    from specctl.train.assemble import build_drafter
    from specctl.train.features.capture import capture
    from specctl.train.init.initial import completed
    from specctl.train.step.optim import Gradient, build_optimizers

    torch.set_num_threads(args.threads)
    recipe = load_recipe(args.recipe, args.set)
    target = load_target(recipe.target.name, dtype=args.dtype or recipe.target.dtype)
    torch.manual_seed(0)
    size = recipe.vocab.size
    kept = torch.randperm(target.spec.vocab_size)[:size].sort().values if size else None
    vocab = None if kept is None else VocabMap(kept, target.spec.vocab_size)
    drafter = build_drafter(
        completed(recipe.drafter, target.spec), recipe.train, target.spec, vocab
    )
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    if getattr(recipe.train, "compile", False):  # not in older checkouts
        from specctl.train.step.compiled_layers import compile_layers

        compile_layers(drafter.module, drafter.family)
    sizes = frozenset({target.spec.vocab_size, size or 0})
    trainable = drafter.trainable()
    optimizers = build_optimizers(trainable, recipe.train, sizes)
    gradient = Gradient(trainable)
    torch.manual_seed(1)
    batch = batch_of(args, target.spec.vocab_size)
    if importlib.util.find_spec("specctl.train.features.reading"):  # not in older checkouts
        from specctl.train.features.reading import reading_target

        target = reading_target(target, recipe.train)
    if importlib.util.find_spec("specctl.core.device.kept_memory"):  # nor this
        from specctl.core.device.kept_memory import kept_memory

        kept = kept_memory(torch.device("cpu"))
        kept.__enter__()
    print("ready", flush=True)
    step = steps_of(args)
    for _ in sys.stdin:
        with step():
            gradient.zero()
            marks = [time.perf_counter()]
            full = capture(target, batch, drafter.needs())
            marks.append(time.perf_counter())
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16"):
                out = drafter.loss(full)
            marks.append(time.perf_counter())
            out.sum.backward()  # type: ignore[no-untyped-call]
            marks.append(time.perf_counter())
            if hasattr(gradient, "clip"):  # in older checkouts
                gradient.divide(out.count.clamp(min=1e-9))
            else:
                count = max(float(out.count), 1e-9)
                gradient.divide(count, gradient.norm(count))
            for optimizer in optimizers.values():
                optimizer.step()
            marks.append(time.perf_counter())
        loss = (out.sum / out.count).item()
        spent = [end - start for start, end in pairwise(marks)]
        print(json.dumps({"value": loss, **dict(zip(PARTS, spent, strict=True))}), flush=True)


def steps_of(args: argparse.Namespace) -> Callable[[], AbstractContextManager[None]]:
    """Around every step: the number of threads chosen as in training, or left alone."""
    if not args.chosen:
        return nullcontext
    from specctl.runtime.measure.reporter import SilentReporter
    from specctl.train.distributed.ranks import Ranks
    from specctl.train.step.step_threads import StepThreads

    return StepThreads.of(Ranks(), SilentReporter()).step


class Worker:
    """One checkout at work."""

    def __init__(self, root: Path, *more: str) -> None:
        words = [sys.executable, __file__, *sys.argv[1:], *more, "--child"]
        env = os.environ | {"PYTHONPATH": str(root / "src")}
        self.process = subprocess.Popen(
            words, text=True, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answer()

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self._answer())
        return found

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a checkout ended without an answer; its error is above")
        return line


def markdown(found: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> str:
    tokens = args.rows * args.seq_len
    lines = [
        f"Recipe {args.recipe}, {args.rows} rows of {args.seq_len}, documents of {args.document}, "
        f"{args.threads} threads; medians of {args.steps} steps, in ms.",
        "",
        f"| checkout | {' | '.join(PARTS)} | step | tokens/s |",
        f"|---|{'---|' * (len(PARTS) + 2)}",
    ]
    for name, steps in found.items():
        parts = [median(step[part] for step in steps) for part in PARTS]
        whole = median(sum(step[part] for part in PARTS) for step in steps)
        cells = [f"{1000 * seconds:,.0f}" for seconds in (*parts, whole)]
        lines.append(f"| {name} | {' | '.join(cells)} | {tokens / whole:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="eagle3")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dtype", default=None, help="of the target")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=288)
    parser.add_argument("--document", type=int, default=144)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", type=Path, default=None, help="root of another checkout")
    parser.add_argument("--compile", action="store_true", help="beside train.compile=true")
    parser.add_argument("--ways", action="store_true", help="one thread, all, and as chosen")
    parser.add_argument("--neighbours", type=int, default=0, help="processes beside it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--chosen", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        work(args)
        return
    workers = {} if args.against is None else {"before": Worker(args.against.resolve())}
    if args.ways:
        workers["one thread"] = Worker(HERE, "--threads", "1")
        workers["all threads"] = Worker(HERE)
        workers["as many as are faster"] = Worker(HERE, "--chosen")
    else:
        workers["this"] = Worker(HERE)
    if args.compile:
        workers["this, compiled"] = Worker(HERE, "--set", "train.compile=true")
    first = {}
    for name, worker in workers.items():
        began = time.perf_counter()
        first[name] = worker.step()["value"]
        print(f"{name}: first step {time.perf_counter() - began:.1f} s", file=sys.stderr)
    assert max(first.values()) - min(first.values()) < 0.02 * abs(min(first.values())), first
    found: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    with busy_neighbours(args.neighbours):
        for _ in range(args.steps):
            for name, worker in workers.items():
                found[name].append(worker.step())
    print(json.dumps(found) if args.json else markdown(found, args))


if __name__ == "__main__":
    main()
