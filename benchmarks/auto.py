"""Is `--draft auto` ever slower than plain decoding? One row per workload and sampling.

Plain decoding and auto run the same prompts in turn, prompt by prompt and in both orders, in one
process, so that a machine that slows down slows both, `--repeats` times. A row gives the ratio of
the sums of their wall-clock times and of their processor times (`time.process_time`, which other
processes hardly lengthen), medians over the repeats, with the spread of the latter, and the mean of
either over pairs of texts with the standard error; with --control the same means of plain decoding
against itself, which tell what the machine's noise makes of no difference at all; the share of
rounds that were off, and what the host spent choosing per such round, as a share of a plain step;
that is measured in a run of its own, since clocks take time as well. With --neighbours so many
other processes compile meanwhile; that needs many pairs (--repeats). The claim: every ratio of
processor times is at least 0.97, and the host share is below 3 % where everything is off. --check
exits with 8 otherwise.

    python benchmarks/auto.py --check
    python benchmarks/auto.py --inflate 300m --prompts 3 --tokens 64 --json
    python benchmarks/auto.py --temperatures 0.8 --neighbours 1 --control --prompts 16 --repeats 50
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, ClassVar

import torch
from pairs import Spent, busy_neighbours, mean_ratio, now
from workloads import WORKLOADS

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import DraftState, RoundView
from specctl.core.tree import DraftTree
from specctl.recipes.load import load_recipe
from specctl.runtime.controllers.base import OFF
from specctl.runtime.generate import Generated, generate
from specctl.runtime.measure.cost import equip, measure_costs
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.base import GrowRequest, RestSpan
from specctl.runtime.policies.switch import Switch
from specctl.runtime.target.target import Target

LEAST, MOST_HOST = 0.97, 0.03


@dataclass(frozen=True, slots=True)
class Row:
    workload: str
    temperature: float
    ratio: float
    processor_ratio: float
    processor_spread: tuple[float, float]
    mean: tuple[float, float]
    control: tuple[float, float] | None
    wall_mean: tuple[float, float]
    wall_control: tuple[float, float] | None
    tau: float
    off: float
    rested: float
    host_share: float
    identical: bool


class Timed(Switch):
    """The same policy, which adds up its own time in rounds that were off, and between them."""

    spent: ClassVar[float] = 0.0
    chose: ClassVar[float] = 0.0

    def rests(self, state: DraftState, view: RoundView) -> bool:
        began = time.perf_counter()
        rests = Switch.rests(self, state, view)
        Timed.chose = time.perf_counter() - began
        Timed.spent += Timed.chose if rests else 0.0
        return rests

    def grow(self, growth: GrowRequest) -> DraftTree:
        began = time.perf_counter()
        tree = Switch.grow(self, growth)
        if tree.num_nodes == 0:
            Timed.spent += Timed.chose + time.perf_counter() - began
        return tree

    def wakes(self, view: RoundView) -> bool:
        began = time.perf_counter()
        wakes = Switch.wakes(self, view)
        Timed.spent += time.perf_counter() - began
        return wakes

    def rested(self, rest: RestSpan) -> None:
        began = time.perf_counter()
        Switch.rested(self, rest)
        Timed.spent += time.perf_counter() - began


def row(
    target: Target,
    workload: str,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    policy: Switch,
    timed: Timed,
    repeats: int,
    control: bool,
) -> Row:
    drafter = load_drafter("auto", target)

    def plain(prompt: list[int]) -> Generated:
        return generate(target, [prompt], sampling=sampling)

    def auto(prompt: list[int]) -> Generated:
        return generate(target, [prompt], drafter=drafter, sampling=sampling, policy=policy)

    Timed.spent, unplayed = 0.0, 0
    for prompt in prompts:
        found = generate(target, [prompt], drafter=drafter, sampling=sampling, policy=timed)
        unplayed += found.stats.to_json()["controller"]["arms"].get(OFF, {"rounds": 0})["rounds"]
    host = Timed.spent / max(unplayed, 1)
    plain(prompts[0]), auto(prompts[0])
    ways = {"plain": plain, "auto": auto} | ({"again": plain} if control else {})
    every = [{name: Spent() for name in ways} for _ in range(repeats)]
    rounds = tokens = off = rested = 0
    steps, same = [], True
    for index, prompt in enumerate(list(prompts) * repeats):
        spent = every[index // len(prompts)]
        made, turn = {}, (index + index // len(prompts)) % len(ways)
        for name, way in [*ways.items()][turn:] + [*ways.items()][:turn]:
            began = now()
            made[name] = way(prompt)
            spent[name].add(began)
        stats: dict[str, Any] = made["auto"].stats.to_json()
        report = stats["controller"]
        same = same and made["auto"].outputs[0].token_ids == made["plain"].outputs[0].token_ids
        rounds, tokens = rounds + stats["rounds"], tokens + stats["tokens"]
        off += report["arms"].get(OFF, {"rounds": 0})["rounds"]
        rested += report.get("rested", 0)
        base = made["plain"].stats
        steps.append((base.seconds - base.prefill_seconds) / max(base.tokens, 1))
    wall, processor = (
        [getattr(spent["plain"], name) / getattr(spent["auto"], name) for spent in every]
        for name in ("wall", "processor")
    )

    def means(times: str) -> tuple[tuple[float, float], tuple[float, float] | None]:
        """Plain over auto, and over itself."""
        found = mean_ratio([(spent["plain"], spent["auto"]) for spent in every], times)
        if not control:
            return found, None
        return found, mean_ratio([(spent["plain"], spent["again"]) for spent in every], times)

    return Row(
        workload,
        sampling.temperature,
        round(median(wall), 3),
        round(median(processor), 3),
        (round(min(processor), 3), round(max(processor), 3)),
        *means("processors"),
        *means("walls"),
        round(tokens / rounds, 2),
        round(off / rounds, 3),
        round(rested / rounds, 3),
        round(host / median(steps), 4),
        same,
    )


def measure(target: Target, args: argparse.Namespace) -> list[Row]:
    serve = load_recipe("auto").serve.model_dump()
    policy = make_policy(serve)
    assert isinstance(policy, Switch)
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        sampling = Sampling(temperature, max_new_tokens=args.tokens, ignore_eos=True)
        drafter = load_drafter("auto", target)
        warm = [WORKLOADS["code"](target, 1)[0]]
        costs = measure_costs(target, drafter, policy, warm, rounds=32, sampling=sampling)
        priced = equip(policy, costs).policy
        assert isinstance(priced, Switch)
        fields = ("controller", "length", "nodes", "lengths", "costs")
        timed = Timed(**{name: getattr(priced, name) for name in fields})
        for name in args.workloads.split(","):
            prompts = WORKLOADS[name](target, args.prompts)
            rows.append(
                row(target, name, prompts, sampling, priced, timed, args.repeats, args.control)
            )
            if not args.json:
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--control", action="store_true", help="plain against plain, too")
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 8 if the claim fails")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    with busy_neighbours(args.neighbours):
        rows = measure(target, args)
    if args.json:
        about = {"inflated": target.inflated, "dtype": args.dtype, "tokens": args.tokens}
        load = {"threads": torch.get_num_threads(), "neighbours": args.neighbours}
        print(json.dumps({**about, **load, "rows": [asdict(r) for r in rows]}))
    bad = [
        r for r in rows if r.processor_ratio < LEAST or (r.off > 0.9 and r.host_share > MOST_HOST)
    ]
    if args.check and bad:
        print(f"slower than {LEAST}x plain decoding, or dear while off: {bad}", file=sys.stderr)
        raise SystemExit(8)


if __name__ == "__main__":
    main()
