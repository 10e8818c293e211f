"""The table of drafters that need no training: every one of them on every workload.

Every recipe whose family has nothing to train is built and served as it says; those that retrieve
from texts are given the held-out prompts that are not asked. All contenders run interleaved in one
process; rows are medians. What cannot run without something of the user's own is listed with its
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

import torch
from workloads import WORKLOADS

from specctl import Sampling, load_target
from specctl.core.drafter import Drafter
from specctl.core.errors import SpecctlError
from specctl.drafters import families
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.bench import (
    Contender,
    OnAnswers,
    Prompts,
    bench,
    engine_contender,
    unreported,
)
from specctl.runtime.measure.bench_report import BenchReport
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.timed import Timed
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.assemble import family_options
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.datastore import teach

CORPUS_PROMPTS = 240


def free_recipes() -> list[str]:
    """Recipes whose family has nothing to train, in alphabetical order."""
    return [n for n in recipe_names() if not families()[load_recipe(n).drafter.family].trainable]


def build(recipe: Recipe, target: Target, texts: list[list[int]]) -> Drafter:
    """A fresh drafter of the recipe; one that retrieves from texts gets them."""
    found = families()[recipe.drafter.family]
    drafter = found.build(family_options(found, recipe.drafter), target.spec, None)
    teach(drafter, target, texts)
    return drafter.to(target.device, target.dtype)


def contender(target: Target, name: str, texts: list[list[int]], prompts: Prompts) -> Contender:
    """The recipe as it is served, with a memory that is empty at the start of every run."""
    recipe = load_recipe(name)
    policy = make_policy(recipe.serve.model_dump())
    costs = None
    if recipe.serve.adaptive:
        costs = measure_costs(target, build(recipe, target, texts), policy, prompts)

    def run(prompts: Prompts, sampling: Sampling, on_answers: OnAnswers) -> Timed:
        torch.manual_seed(0)
        return engine_contender(
            name,
            target,
            build(recipe, target, texts),
            policy,
            rule=recipe.serve.rule,
            costs=lambda sampling: costs,
        ).run(prompts, sampling, on_answers)

    return Contender(name, run)


def contenders(target: Target, names: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Plain decoding first, then the drafters; and those that cannot run here, with the reason."""
    ways, missing = [engine_contender("plain", target)], dict[str, str]()
    texts = [list(p.ids) for p in heldout_prompts(target, 10_000)[-CORPUS_PROMPTS:]]
    for name in names:
        try:
            way = contender(target, name, texts, WORKLOADS["prose"](target, 2))
            way.run([[1, 2, 3]], Sampling(max_new_tokens=2, ignore_eos=True), unreported)
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
    parser.add_argument("--drafters", default=",".join(free_recipes()), help="recipes")
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
