"""What does a drafter that is always wrong cost beside plain decoding, with its length chooser?

Untrained drafters under `--adaptive`. Every text is decoded plainly and with the drafter in turn,
in both orders, in one process. One chooser goes from text to text, as where many are answered; with
--anew every text has its own, as where one command answers one. A row gives the ratio of the sums
of their processor times over `--prompts` texts, the median of `--repeats` with the spread, the mean
over pairs of texts with its error, the same of the wall clock, and the tokens drafted per text.
With --neighbours so many other processes compile meanwhile. --check exits with 8 below --least.

    python benchmarks/bad_drafter.py
    python benchmarks/bad_drafter.py --drafters eagle3 --tokens 512 --check
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

import torch
from pairs import Spent, busy_neighbours, mean_ratio, now
from workloads import WORKLOADS

from specctl import Sampling, load_target
from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost import equip, measure_costs
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target


def untrained(recipe: str, target: Target) -> Drafter:
    """The recipe's drafter with random weights."""
    part = load_recipe(recipe).drafter
    torch.manual_seed(0)
    entry = family(part.family)
    built = entry.build(entry.options(**part.options), target.spec, None)
    return built.to("cpu", target.dtype)


def ratios(
    target: Target, drafter: Drafter, workload: str, sampling: Sampling, args: argparse.Namespace
) -> tuple[list[float], list[tuple[float, float]], float]:
    """Plain over drafted: of each repeat, processor seconds; of pairs of texts, the mean and its
    error, of processor and of wall-clock seconds; tokens drafted per text."""
    policy, warm = make_policy({"policy": "chain", "length": 5}), WORKLOADS["code"](target, 1)
    costs = measure_costs(target, drafter, policy, warm, rounds=32, sampling=sampling)
    equipped = equip(policy, costs)
    pairs, drafted = [], 0
    for repeat in range(args.repeats):
        plain, bad = Spent(), Spent()
        for index, prompt in enumerate(WORKLOADS[workload](target, args.prompts)):
            for is_plain in (True, False) if (index + repeat) % 2 else (False, True):
                began = now()
                if is_plain:
                    generate(target, [prompt], sampling=sampling)
                    plain.add(began)
                    continue
                if args.anew:
                    equipped = equip(policy, costs)
                made = generate(
                    target, [prompt], drafter=drafter, sampling=sampling, policy=equipped.policy,
                    chooser=equipped.chooser,
                )  # fmt: skip
                bad.add(began)
                drafted += made.stats.drafted
        pairs.append((plain, bad))
    found = [plain.processor / bad.processor for plain, bad in pairs]
    means = [mean_ratio(pairs, times) for times in ("processors", "walls")]
    return found, means, drafted / (args.repeats * args.prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafters", default="eagle3,distill", help="recipes, untrained")
    parser.add_argument("--workloads", default="code,random")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--anew", action="store_true", help="a chooser for every text")
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside it")
    parser.add_argument("--least", type=float, default=0.9)
    parser.add_argument("--check", action="store_true", help="exit with 8 below --least")
    args = parser.parse_args()
    with busy_neighbours(args.neighbours):
        lowest = table(load_target("tiny", dtype="float32", inflate=args.inflate), args)
    if args.check and lowest < args.least:
        print(f"the slowest is {lowest:.3f}x of plain decoding", file=sys.stderr)
        raise SystemExit(8)


def table(target: Target, args: argparse.Namespace) -> float:
    """Prints a row for every cell; the lowest ratio."""
    lowest = 1.0
    print("| untrained | workload | T | processor time, plain / drafted | mean of texts |"
          " wall clock | drafted per text |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for name in args.drafters.split(","):
        drafter = untrained(name, target)
        for temperature in map(float, args.temperatures.split(",")):
            sampling = Sampling(temperature, max_new_tokens=args.tokens, ignore_eos=True)
            for workload in args.workloads.split(","):
                found, means, drafted = ratios(target, drafter, workload, sampling, args)
                lowest = min(lowest, median(found))
                ratio = f"{median(found):.3f} ({min(found):.3f} to {max(found):.3f})"
                both = [f"{middle:.3f} +- {error:.3f}" for middle, error in means]
                cells = (name, workload, f"{temperature:g}", ratio, *both, f"{drafted:.1f}")
                print(f"| {' | '.join(cells)} |", flush=True)
    return lowest


if __name__ == "__main__":
    main()
