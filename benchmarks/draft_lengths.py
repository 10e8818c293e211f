"""How many tokens should a round draft? Fixed lengths beside the chooser, on the same prompts.

Every prompt is decoded in every way in turn, in an order that moves on from prompt to prompt, in
one process; the first prompt is not counted. "adaptive" is `--adaptive`: the length of a round by
the measured costs. A row gives tokens a round, the sum of the seconds of plain decoding over that
of the way, prompts included, and its standard error (jackknife over prompts).

    python benchmarks/draft_lengths.py --draft runs/eagle3-long --inflate 300m
    python benchmarks/draft_lengths.py --draft runs/quickstart --lengths 2,4,6 --threads 1
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost import Equipped, equip, measure_costs
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts


@dataclass(slots=True)
class Row:
    """A way at a temperature, prompt by prompt."""

    way: str
    equipped: Equipped | None
    seconds: list[float] = field(default_factory=list)
    rounds: int = 0
    tokens: int = 0
    same: int = 0

    def decode(
        self, target: Target, drafter: Drafter, ids: Sequence[int], how: Sampling
    ) -> list[int]:
        began = time.perf_counter()
        if self.equipped is None:
            made = generate(target, [ids], sampling=how)
        else:
            policy, chooser = self.equipped.policy, self.equipped.chooser
            made = generate(
                target, [ids], drafter=drafter, sampling=how, policy=policy, chooser=chooser
            )
        self.seconds.append(time.perf_counter() - began)
        self.rounds += made.stats.rounds
        self.tokens += made.stats.tokens
        return list(made.outputs[0].token_ids)


def speed_up(plain: Sequence[float], own: Sequence[float]) -> tuple[float, float]:
    """Ratio of the sums, and its standard error by leaving out one prompt after the other."""
    whole, count = sum(plain) / sum(own), len(plain)
    without = [(sum(plain) - p) / (sum(own) - o) for p, o in zip(plain, own, strict=True)]
    middle = sum(without) / count
    spread = sum((each - middle) ** 2 for each in without) * (count - 1) / count
    return whole, spread**0.5


def measured(
    target: Target, drafter: Drafter, how: Sampling, args: argparse.Namespace
) -> list[Row]:
    prompts = [tuple(prompt.ids) for prompt in heldout_prompts(target, args.prompts + 1)]
    chains = {n: make_policy({"policy": "chain", "length": n}) for n in args.lengths}
    longest = chains[max(chains)]
    costs = measure_costs(target, drafter, longest, prompts[:1], rounds=32, sampling=how)
    rows = [Row("plain", None), Row("adaptive", equip(longest, costs))]
    rows += [Row(f"length {n}", Equipped(chain, None)) for n, chain in chains.items()]
    for index, ids in enumerate(prompts):
        texts = {}
        for place in range(len(rows)):
            row = rows[(index + place) % len(rows)]
            texts[row.way] = row.decode(target, drafter, ids, how)
        for row in rows:
            if index == 0:
                row.seconds, row.rounds, row.tokens = [], 0, 0
            else:
                row.same += texts[row.way] == texts["plain"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", required=True, help="a package or a run")
    parser.add_argument("--lengths", default="2,3,4,5,7", help="with commas between")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    args.lengths = [int(word) for word in args.lengths.split(",")]
    torch.set_num_threads(args.threads)
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    drafter = load_drafter(args.draft, target)
    kept = []
    print("| way | sampling | tau | tokens/s | speed-up | same text |", flush=True)
    print("|---|---|---|---|---|---|")
    for heat in map(float, args.temperatures.split(",")):
        how = Sampling(heat, max_new_tokens=args.tokens, ignore_eos=True)
        rows = measured(target, drafter, how, args)
        for row in rows:
            ratio, error = speed_up(rows[0].seconds, row.seconds)
            rate, tau = row.tokens / sum(row.seconds), row.tokens / row.rounds
            same = f"{row.same} of {args.prompts}" if heat == 0 else "-"
            word = "greedy" if heat == 0 else f"T={heat:g}"
            print(f"| {row.way} | {word} | {tau:.2f} | {rate:.1f} | {ratio:.2f} +- {error:.2f} "
                  f"| {same} |", flush=True)  # fmt: skip
            kept.append({"way": row.way, "temperature": heat, "tau": tau, "seconds": row.seconds})
    if args.json is not None:
        args.json.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
