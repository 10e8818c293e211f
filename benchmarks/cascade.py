"""Is the likeliest chain of a block a better draft than the likeliest token behind each other?

One trained drafter of `dspark` on held-out prompts, in chains without a stop rule: `cascade` off
and with so many candidates a place. Tokens a round at both temperatures +- standard errors over
prompts, and the differences from the first row, paired over prompts.

    python benchmarks/cascade.py --draft runs/dspark/package --counts 2 4 16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from statistics import fmean, stdev

import torch

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts


def taus(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], t: float, n: int
) -> list[float]:
    """Tokens a round of every prompt."""
    policy = make_policy({"policy": "chain", "length": drafter.options.num_heads})
    found = []
    for seed, prompt in enumerate(prompts):
        sampling = Sampling(temperature=t, max_new_tokens=n, seed=seed)
        made = generate(target, [prompt], drafter=drafter, policy=policy, sampling=sampling)
        found.append(made.stats.tau)
    return found


def cell(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} +- {stdev(values) / len(values) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--counts", type=int, nargs="+", default=[4])
    parser.add_argument("--count", type=int, default=48, help="Prompts.")
    parser.add_argument("--tokens", type=int, default=64)
    words = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(words.target)
    drafter = load_drafter(words.draft, target)
    prompts = [one.ids for one in heldout_prompts(target, words.count)]
    print("| `cascade` | greedy | difference | T = 1 | difference |\n|---|---|---|---|---|")
    first: dict[float, list[float]] = {}
    for count in (None, *words.counts):
        one = copy(drafter)
        one.options = replace(drafter.options, cascade=count)
        cells = [str(count or "off")]
        for t in (0.0, 1.0):
            own = taus(target, one, prompts, t, words.tokens)
            before = first.setdefault(t, own)
            apart = [a - b for a, b in zip(own, before, strict=True)]
            cells += [cell(own), cell(apart) if count else "-"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
