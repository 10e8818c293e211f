"""The table of docs/self-speculation.md: drafters without a second model, beside others.

Trains what is missing (`specctl train-draft` or `datastore`, as the recipes say), then measures one
method after another on held-out prompts of the embedded target:

    alpha at positions 1 to 4    chains of 5 without a stop rule, greedy
    tau, T = 0 and T = 0.8       as the recipe serves; mean of the prompts and its standard error
    drafting share, tokens/s     greedy, one prompt at a time, as the recipe serves

With `--speed` it measures what depends on costs instead, on the embedded target or on the same at
the cost of a larger one (`--inflate 300m`), with the same packages, on one thread. Every prompt is
answered by each method in turn, with plain decoding in front of and behind every three of them:

    speed-up          CPU seconds of whole greedy requests, plain over drafted; with quartiles
    tau, drafting     of these requests

Every figure is written to OUT/NAME.json (of `--speed` to OUT/speed-SIZE-DTYPE/NAME.json) when it is
there; run again, it goes on with what is missing.

    python benchmarks/self_speculation.py --out runs/self [--methods kangaroo,swift] [--prompts 40]
    python benchmarks/self_speculation.py --out runs/self --speed --inflate 300m --prompts 8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, quantiles, stdev
from typing import Any

import torch

from specctl import load_drafter, load_target
from specctl.api.train import train_and_package
from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.heldout import heldout_prompts
from specctl.train.planning.scaling import share_data

TRAINED = ("kangaroo", "eesd", "m2r2", "pass", "ppd", "s3d", "hidden-transfer", "eagle3", "distill")
SEARCHED = ("draft-verify", "calm")
PLAIN_EVERY = 3
METHODS = (
    *TRAINED,
    *SEARCHED,
    "unified-skip",
    "swift",
    "layer-skip",
    "del",
    "skip-decode",
    "depth-decay",
    "quantspec",
    "easyspec",
    "speculative-jacobi",
    "prompt-lookup",
)


def package(
    recipe: str,
    out: Path,
    name: str | None = None,
    sets: Sequence[str] = (),
    rows: str | None = None,
) -> Path:
    """OUT/runs/NAME/package (None: the recipe's name), made now if it is not there; on the rows of
    OUT/runs/ROWS, where that run has been and they are those of the recipe."""
    folder = out / "runs" / (name or recipe)
    if not (folder / "package" / "manifest.json").exists():
        if rows is not None and (out / "runs" / rows / "data").exists():
            share_data([out / "runs" / rows], folder)
        if recipe in SEARCHED:
            words = ["datastore", "--recipe", recipe, "--out", str(folder)]
            words += [word for one in sets for word in ("--set", one)]
            subprocess.run([sys.executable, "-m", "specctl", *words], check=True, stdout=sys.stderr)
        else:
            made = load_recipe(recipe, sets=sets)
            train_and_package(SilentReporter(), made, folder, command=sys.argv)
    return folder / "package"


def drafter_of(recipe: str, target: Target, out: Path) -> Drafter:
    if recipe in (*TRAINED, *SEARCHED):
        return load_drafter(str(package(recipe, out)), target)
    part = load_recipe(recipe).drafter
    method = family(part.family)
    return method.build(method.options(**part.options), target.spec, None)


def decode(
    target: Target,
    drafter: Drafter | None,
    serve: dict[str, Any],
    args: Any,
    heat: float,
    rows: int,
) -> tuple[list[Completion], Engine, float]:
    policy = None if drafter is None else make_policy(serve)
    engine = Engine(target, drafter, policy, num_slots=rows)
    sampling = {"temperature": heat, "max_new_tokens": args.tokens, "ignore_eos": True}
    prompts = heldout_prompts(target, args.prompts)
    requests = [
        Request(tuple(p.ids), Sampling(**sampling, seed=i), conversation=p.domain)
        for i, p in enumerate(prompts)
    ]
    engine.run(requests[:1])
    engine.draft_seconds = engine.verify_seconds = 0.0
    began = time.perf_counter()
    return engine.run(requests), engine, time.perf_counter() - began


def taus(done: list[Completion]) -> dict[str, float]:
    each = [row.stats.tokens / row.stats.rounds for row in done]
    return {"tau": mean(each), "error": stdev(each) / len(each) ** 0.5}


def measure(recipe: str, target: Target, found: dict[str, Any], args: Any) -> dict[str, Any]:
    """The first figure of a method that is missing."""
    drafter = None if recipe == "plain" else drafter_of(recipe, target, args.out)
    serve = {} if drafter is None else load_recipe(recipe).serve.model_dump(mode="json")
    if "weights" not in found:
        own = {} if drafter is None else drafter.trainable()
        return {"weights": sum(weight.numel() for weight in own.values())}
    if "alpha" not in found:
        if drafter is None or "chain" not in family(drafter.family).policies:
            return {"alpha": []}
        done, _, _ = decode(target, drafter, {"policy": "chain", "length": 5}, args, 0.0, 8)
        accepted = add_counts(row.stats.accepted_at for row in done)
        return {"alpha": shares(accepted, add_counts(row.stats.tested_at for row in done))}
    if "sampled" not in found:
        return {"sampled": taus(decode(target, drafter, serve, args, 0.8, 8)[0])}
    done, engine, seconds = decode(target, drafter, serve, args, 0.0, 1)
    spent = engine.draft_seconds + engine.verify_seconds
    speed = sum(row.stats.tokens for row in done) / seconds
    share = engine.draft_seconds / spent if spent else 0.0
    return {"greedy": taus(done), "share": share, "speed": speed}


@dataclass(frozen=True, slots=True)
class Timed:
    """One answered request."""

    tokens: tuple[int, ...]
    rounds: int
    cpu_seconds: float
    draft_seconds: float
    verify_seconds: float

    @classmethod
    def of(cls, engine: Engine, request: Request) -> Timed:
        drafting, verifying = engine.draft_seconds, engine.verify_seconds
        began = time.process_time()
        (done,) = engine.run([request])
        spent = time.process_time() - began
        drafting, verifying = engine.draft_seconds - drafting, engine.verify_seconds - verifying
        return cls(done.tokens, done.stats.rounds, spent, drafting, verifying)


def engine_of(recipe: str, target: Target, out: Path) -> Engine:
    if recipe == "plain":
        return Engine(target, None, None)
    serve = load_recipe(recipe).serve.model_dump(mode="json")
    return Engine(target, drafter_of(recipe, target, out), make_policy(serve))


def speed(target: Target, methods: list[str], args: Any) -> None:
    """Measures prompt by prompt, and keeps what is there."""
    torch.set_num_threads(1)
    folder = args.out / f"speed-{args.inflate or 'embedded'}-{args.dtype}"
    found = {recipe: kept(folder / f"{recipe}.json") or {"prompts": []} for recipe in methods}
    prompts = [tuple(prompt.ids) for prompt in heldout_prompts(target, args.prompts)]
    engines = {recipe: engine_of(recipe, target, args.out) for recipe in ("plain", *methods)}
    for engine in engines.values():
        engine.run([Request(prompts[0], Sampling(max_new_tokens=8, ignore_eos=True))])
    for at, prompt in enumerate(prompts):
        request = Request(prompt, Sampling(max_new_tokens=args.tokens, ignore_eos=True))
        order = [each for each in methods if len(found[each]["prompts"]) <= at]
        order = order[at % len(order) :] + order[: at % len(order)] if order else []
        before = Timed.of(engines["plain"], request) if order else None
        for first in range(0, len(order), PLAIN_EVERY):
            some = order[first : first + PLAIN_EVERY]
            runs = {recipe: Timed.of(engines[recipe], request) for recipe in some}
            after = Timed.of(engines["plain"], request)
            assert before is not None
            for recipe, run in runs.items():
                plain = (before.cpu_seconds + after.cpu_seconds) / 2
                same, load = run.tokens == before.tokens, os.getloadavg()[0]
                figures = {**asdict(run), "plain_seconds": plain, "same": same, "load": load}
                found[recipe]["prompts"].append(figures)
                keep(folder / f"{recipe}.json", found[recipe])
            before = after
    print("| method | speed-up | tau, greedy | drafting | same texts |\n|---|---|---|---|---|")
    for recipe in methods:
        print(speed_line(recipe, found[recipe]["prompts"][: args.prompts]))


def speed_line(recipe: str, runs: list[dict[str, Any]]) -> str:
    ratios = [run["plain_seconds"] / run["cpu_seconds"] for run in runs]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    each = [len(run["tokens"]) / run["rounds"] for run in runs]
    drafting = sum(run["draft_seconds"] for run in runs)
    share = drafting / (drafting + sum(run["verify_seconds"] for run in runs))
    return (
        f"| {recipe} | {middle:.2f} [{low:.2f}, {high:.2f}] | "
        f"{mean(each):.2f} +- {stdev(each) / len(each) ** 0.5:.2f} | {share:.0%} | "
        f"{sum(run['same'] for run in runs)} of {len(runs)} |"
    )


def line(recipe: str, found: dict[str, Any]) -> str:
    alpha = " ".join(f"{a:.2f}" for a in found["alpha"][:4]) or "-"
    greedy, sampled = (
        f"{found[name]['tau']:.2f} +- {found[name]['error']:.2f}" for name in ("greedy", "sampled")
    )
    return (
        f"| {recipe} | {found['weights']:,} | {alpha} | {greedy} | {sampled} | "
        f"{found['share']:.0%} | {found['speed']:.0f} |"
    )


def kept(file: Path) -> dict[str, Any]:
    """The figures of a file; none where there is none."""
    return json.loads(file.read_text()) if file.exists() else {}


def keep(file: Path, found: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))


def quality(target: Target, methods: list[str], args: Any) -> None:
    lines = []
    for recipe in methods:
        found = kept(file := args.out / f"{recipe}.json")
        while "speed" not in found:
            found |= measure(recipe, target, found, args)
            keep(file, found)
            print(f"{recipe}: {', '.join(found)}", file=sys.stderr, flush=True)
        lines.append(line(recipe, found))
    print("| method | weights | alpha | tau, greedy | tau, T = 0.8 | drafting | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/self"))
    parser.add_argument("--methods", default=",".join(("plain", *METHODS)))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--speed", action="store_true", help="seconds beside plain decoding")
    parser.add_argument("--inflate", default=None, help="with --speed: 300m, for example")
    parser.add_argument("--dtype", default="float32", help="with --speed")
    args = parser.parse_args()
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    methods = args.methods.split(",")
    if args.speed:
        speed(target, [recipe for recipe in methods if recipe != "plain"], args)
    else:
        quality(target, methods, args)


if __name__ == "__main__":
    main()
