"""The table of drafters: tau and tokens/s of every trained recipe beside untrained and retrieval.

Trains what is missing (`specctl train-draft --recipe R --out OUT/R`), a recipe in LONG with the
fields given there: longer than the five minutes that recipes for the embedded target take (--short:
as they say). Then it measures all drafters interleaved in one process on held-out prompts, greedy
and at T = 0.8, on the embedded target and, with --inflate, on the cost-inflated one (same text, the
cost of a larger model).

    python benchmarks/drafters.py --out runs/bench --recipes distill,eagle3,medusa --json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.measure.bench import Contender, bench, engine_contender
from specctl.runtime.measure.bench_report import BenchReport
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

RETRIEVAL = ("prompt-lookup", "token-recycling")
LONG = {  # of docs/benchmarks/trained.md: a quarter of an hour to an hour each on two cores
    "distill": ("train.steps=1800", "data.prompts=6000"),
    "eagle3": ("train.steps=1300", "data.prompts=6000"),
    "medusa": ("train.steps=450", "data.prompts=2000"),
}


def trained(recipe: str, out: Path, sets: tuple[str, ...]) -> Path:
    """OUT/RECIPE/package, trained now with these fields changed if it is not there."""
    package = out / recipe / "package"
    if not (package / "manifest.json").exists():
        command = [sys.executable, "-m", "specctl", "train-draft", "--recipe", recipe]
        changed = [word for text in sets for word in ("--set", text)]
        words = [*command, "--out", str(out / recipe), *changed]
        subprocess.run(words, check=True, stdout=sys.stderr)
    return package


def untrained(recipe: str, target: Target) -> Drafter:
    """The same recipe's drafter with fresh weights."""
    part = load_recipe(recipe).drafter
    torch.manual_seed(0)
    entry = family(part.family)
    return entry.build(entry.options(**part.options), target.spec, None)


def contenders(target: Target, packages: dict[str, Path], length: int) -> list[Contender]:
    """Plain decoding first (the baseline), then every drafter as a chain, then as a tree;
    `packages` by recipe."""
    chain = {"policy": "chain", "length": length}
    direct = {"policy": "direct", "length": length, "nodes": 24}
    tree = {"policy": "dynamic-tree", "length": length, "nodes": 12, "beam": 3}
    found = [engine_contender("plain", target)]
    for name in RETRIEVAL:
        found.append(
            engine_contender(name, target, load_drafter(name, target), make_policy(direct))
        )
    for recipe, package in packages.items():
        drafter = load_drafter(str(package), target)
        stepwise = "chain" in family(drafter.family).policies
        fresh = untrained(recipe, target)
        serve = make_policy(chain if stepwise else direct)
        found.append(engine_contender(f"{recipe} untrained", target, fresh, serve))
        found.append(engine_contender(recipe, target, drafter, serve))
        if stepwise:
            found.append(engine_contender(f"{recipe} tree", target, drafter, make_policy(tree)))
    return found


def markdown(report: BenchReport) -> str:
    """One table in the words of runtime/measure/stats.py."""
    note = f"inflated to the cost of {report.inflated}" if report.inflated else "embedded"
    lines = [
        f"Target: {report.target} ({note}), {report.dtype}, {report.device}, "
        f"{report.threads} threads, {report.num_prompts} held-out prompts x {report.new_tokens} "
        f"tokens, medians of {report.repeats}.",
        "",
        "| drafter | setting | tau | tokens/s | speed-up | draft share | repetition |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        tau = "-" if row.tau is None else f"{row.tau:.2f}"
        share = "-" if row.draft_share is None else f"{row.draft_share:.0%}"
        lines.append(
            f"| {row.name} | {row.setting} | {tau} | {row.tokens_per_second:.0f} | "
            f"{row.speedup:.2f}x | {share} | {row.repetition_rate:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--recipes", default="distill,eagle3,medusa")
    parser.add_argument("--short", action="store_true", help="train as long as the recipes say")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    prompts = [list(p.ids) for p in heldout_prompts(target, args.prompts)]
    settings = [
        Sampling(temperature=t, max_new_tokens=args.tokens, ignore_eos=True) for t in (0.0, 0.8)
    ]
    recipes = [name for name in args.recipes.split(",") if name]
    long = {} if args.short else LONG
    packages = {name: trained(name, args.out, long.get(name, ())) for name in recipes}
    rows = contenders(target, packages, args.length)
    report = bench(target, rows, prompts, settings, repeats=args.repeats)
    out: dict[str, Any] = report.to_json()
    print(json.dumps(out) if args.json else markdown(report))


if __name__ == "__main__":
    main()
