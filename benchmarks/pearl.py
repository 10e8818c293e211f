"""Does drafting while verifying (PEARL) pay on this machine?

The same drafter, chain and length, one after the other and in parallel, each with one thread and
with all of them, interleaved in one process on the same prompts. In parallel, target and drafter
have so many threads each. What decides is the better of each pair: "threads" says which it was.

    python benchmarks/pearl.py --draft runs/distill/package --length 4
    python benchmarks/pearl.py --draft runs/distill/package --inflate 300m --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os

import torch

from specctl import Sampling, load_drafter, load_target
from specctl.cli.app.console import Console
from specctl.runtime.measure.bench import Contender, OnAnswers, Prompts, bench, engine_contender
from specctl.runtime.measure.bench_report import BenchRow
from specctl.runtime.measure.timed import Timed
from specctl.runtime.policies import make_policy
from specctl.train.data.prompts.heldout import heldout_prompts


def threaded(contender: Contender, count: int) -> Contender:
    """The same way to continue prompts, computing with so many threads."""

    def run(prompts: Prompts, sampling: Sampling, on_answers: OnAnswers) -> Timed:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return contender.run(prompts, sampling, on_answers)
        finally:
            torch.set_num_threads(before)

    return Contender(f"{contender.name}, threads {count}", run)


def best(rows: list[BenchRow], name: str, setting: str) -> BenchRow:
    """The fastest row of a way to decode, over its numbers of threads."""
    own = [row for row in rows if row.name.startswith(f"{name},") and row.setting == setting]
    return max(own, key=lambda row: row.tokens_per_second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", required=True, help="package of a drafter that drafts chains")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    drafter = load_drafter(args.draft, target).to(target.device, target.dtype)
    chain = make_policy({"policy": "chain", "length": args.length})
    ways = [
        engine_contender("plain", target),
        engine_contender("in turn", target, drafter, chain),
        engine_contender("in parallel", target, drafter, chain, parallel=True),
    ]
    threads = sorted({1, os.cpu_count() or 1})
    contenders = [threaded(way, count) for way in ways for count in threads]
    prompts = [list(p.ids) for p in heldout_prompts(target, args.prompts)]
    settings = [
        Sampling(temperature=t, max_new_tokens=args.tokens, ignore_eos=True) for t in (0.0, 0.8)
    ]
    rows = list(bench(target, contenders, prompts, settings, repeats=args.repeats).rows)
    verdicts = {
        setting: best(rows, "in parallel", setting).tokens_per_second
        / best(rows, "in turn", setting).tokens_per_second
        for setting in dict.fromkeys(row.setting for row in rows)
    }
    if args.json:
        print(json.dumps({"rows": [row.to_json() for row in rows], "parallel_pays": verdicts}))
        return
    Console().table(
        ("way", "setting", "tau", "tokens/s"),
        [(r.name, r.setting, f"{r.tau:.2f}", f"{r.tokens_per_second:.0f}") for r in rows],
    )
    for setting, ratio in verdicts.items():
        print(f"{setting}: the best in parallel is {ratio:.2f}x the best in turn")


if __name__ == "__main__":
    main()
