"""The table of drafters that need no training: every one of them on every workload.

The drafters are found in the registry (families that have nothing to train), each is built and
served as its recipe of the same name says. All contenders run interleaved in one process; rows are
medians. A drafter that cannot be built without something of the user's own is listed with its
reason. Text generated greedily or under rule target-only does not depend on the drafter, so that
taus compare over the same text; the repetition rate says how much of it repeats.

    python benchmarks/training_free.py
    python benchmarks/training_free.py --inflate 300m --prompts 4 --json
    python benchmarks/training_free.py --drafters goose,stand,aded --workloads code,prose
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from workloads import WORKLOADS

from specctl import Sampling, load_target
from specctl.drafters import families
from specctl.drafters.parts.base import Family
from specctl.recipes.errors import SpecctlError
from specctl.recipes.load import load_recipe
from specctl.runtime.bench import BenchReport, Contender, bench, engine_contender
from specctl.runtime.policies import make_policy
from specctl.runtime.target import Target


def contender(target: Target, found: Family) -> Contender:
    """The family as its recipe builds and serves it; a fresh drafter for each run."""
    recipe = load_recipe(found.name)
    options = found.options(**recipe.drafter.options)
    serve = recipe.serve.model_dump()
    found.build(options, target.spec, None)

    def run(prompts: Any, sampling: Sampling) -> Any:
        drafter = found.build(options, target.spec, None)
        once = engine_contender(
            found.name, target, drafter, make_policy(serve), rule=recipe.serve.rule
        )
        return once.run(prompts, sampling)

    return Contender(found.name, run)


def contenders(target: Target, names: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Plain decoding first, then the drafters; and those that cannot run here, with the reason."""
    ways, missing = [engine_contender("plain", target)], dict[str, str]()
    for name in names:
        try:
            way = contender(target, families()[name])
            way.run([[1, 2, 3]], Sampling(max_new_tokens=2, ignore_eos=True))
            ways.append(way)
        except SpecctlError as error:
            missing[name] = str(error)
    return ways, missing


def rows_of(workload: str, report: BenchReport) -> list[dict[str, Any]]:
    return [{"workload": workload, **row.to_json()} for row in report.rows]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| workload | drafter | setting | tau | tokens/s | vs plain | draft share | repetition |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['workload']} | {row['name']} | {row['setting']} | {row['tau']:.2f} | "
            f"{row['tokens_per_second']:.0f} | {row['speedup']:.2f}x | {row['draft_share']:.0%} | "
            f"{row['repetition_rate']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    free = [name for name, found in families().items() if not found.trainable]
    parser.add_argument("--drafters", default=",".join(free))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    ways, missing = contenders(target, [name for name in args.drafters.split(",") if name])
    settings = [
        Sampling(temperature=float(t), max_new_tokens=args.tokens, ignore_eos=True)
        for t in args.temperatures.split(",")
    ]
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for workload in args.workloads.split(","):
        prompts = WORKLOADS[workload](target, args.prompts)
        report = bench(target, ways, prompts, settings, repeats=args.repeats)
        about = {key: value for key, value in report.to_json().items() if key != "rows"}
        rows += rows_of(workload, report)
        print(f"{workload}: done", file=sys.stderr)
    if args.json:
        print(json.dumps({**about, "rows": rows, "missing": missing}))
        return
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    print(markdown(rows))
    for name, reason in missing.items():
        print(f"\n{name}: {reason}")


if __name__ == "__main__":
    main()
