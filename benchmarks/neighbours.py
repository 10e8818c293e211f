"""Plain decoding beside processes that keep the cores busy: on all threads, on one, and on as many
as specctl finds faster (models/native/threads.py).

The ways take turns, text by text, in one process; tokens per second are medians over texts with
their quartiles, means are of all the time they took.

    python benchmarks/neighbours.py
    python benchmarks/neighbours.py --inflate 300m --prompts 2 --tokens 32 --busy 0,1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
from pairs import Spent, busy_neighbours, now
from workloads import WORKLOADS

from specctl import Sampling, load_target
from specctl.models.native import step
from specctl.models.native.threads import Threads, threads_of
from specctl.runtime.generate import generate
from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True)
class Always:
    """So many threads, whatever they take."""

    count: int

    def begin(self, now: float) -> int:
        return self.count

    def end(self, *of_step: Any) -> None:
        pass


WAYS: dict[str, Callable[[int], Threads | Always]] = {
    "all threads": Always,
    "one thread": lambda most: Always(1),
    "as many as are faster": threads_of,
}


def rows(target: Target, busy: int, args: argparse.Namespace) -> None:
    """Prints what every way takes beside so many processes."""
    prompts = WORKLOADS["code"](target, args.prompts)
    sampling = Sampling(args.temperature, max_new_tokens=args.tokens, ignore_eos=True)
    spent = {name: Spent() for name in WAYS}
    texts = {}
    for repeat in range(args.repeats + 1):  # one to get used to the company
        turn = repeat % len(WAYS)
        for name, way in [*WAYS.items()][turn:] + [*WAYS.items()][:turn]:
            step.threads_of = way  # type: ignore[assignment]
            for prompt in prompts:
                began = now()
                found = generate(target, [prompt], sampling=sampling).outputs[0].token_ids
                assert texts.setdefault(tuple(prompt), found) == found, "another text"
                if repeat:
                    spent[name].add(began)
    for name, took in spent.items():
        rates = [args.tokens / seconds for seconds in took.walls]
        low, middle, high = quantiles(rates, n=4, method="inclusive")
        mean = args.tokens * len(rates) / took.wall
        print(f"| {busy} | {name} | {mean:,.0f} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) |",
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", default="0,1,2", help="processes beside it")
    parser.add_argument("--prompts", type=int, default=8, help="two or more")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    print(f"{torch.get_num_threads()} threads\n")
    print("| busy processes | way | tokens/s | median of texts (quartiles) |\n|---|---|---|---|")
    for busy in map(int, args.busy.split(",")):
        with busy_neighbours(busy):
            time.sleep(1.0 if busy else 0.0)
            rows(target, busy, args)


if __name__ == "__main__":
    main()
