"""The table of docs/self-speculation.md: drafters without a second model, beside others.

Trains what is missing, every trained method for as many steps on the same rows (EQUAL), or searches
as the recipe says (`specctl datastore`), then measures one method after another on held-out prompts
of the embedded target:

    alpha at positions 1 to 4    chains of 5 without a stop rule, greedy, and tau of these chains
    tau, tree                    greedy trees of 24 nodes, where the family can draft trees
    tau, T = 0.8                 as the recipe serves; means of the prompts and standard errors

With `--speed` it measures what depends on costs instead, on the embedded target or on the same at
the cost of a larger one (`--inflate 300m`), with the same packages, on one thread, as the recipe
serves. Every prompt is answered by each method in turn, with plain decoding in front of and behind
every few of them:

    tokens/s          of CPU seconds of whole greedy requests; mean of the prompts
    speed-up          these seconds, plain over drafted; median and quartiles
    tau, drafting     of these requests

`ppd-fitted` is the recipe ppd with as many rows a round as pay by the costs of the target that is
measured. Every figure is written to OUT/NAME.json (of `--speed` to OUT/speed-SIZE-DTYPE/NAME.json)
when it is there; run again, it goes on with what is missing. `--table` prints all that is there.

    python benchmarks/self_speculation.py --out runs/self [--methods kangaroo,swift] [--prompts 40]
    python benchmarks/self_speculation.py --out runs/self --speed
    python benchmarks/self_speculation.py --out runs/self --speed --inflate 300m
    python benchmarks/self_speculation.py --out runs/self --table
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Any

import torch

from specctl import load_drafter, load_target
from specctl.api.train import train_and_package
from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.cost_table import TreeCosts
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.policies import make_policy, policies_of
from specctl.runtime.policies.prompt_tree import PromptTree
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.planning.scaling import share_data

TRAINED = ("kangaroo", "eesd", "m2r2", "pass", "ppd", "s3d", "hidden-transfer", "eagle3", "distill")
SEARCHED = ("draft-verify", "calm")
FITTED = "-fitted"  # behind a recipe's name: served in the size that the device makes worthwhile
CHAIN = {"policy": "chain", "length": 5}
TREE = {"policy": "dynamic-tree", "length": 5, "beam": 4, "nodes": 24}
# Steps and data of every trained method here, whatever its recipe has.
EQUAL = (
    "target.dtype=bfloat16",
    "data.prompts=800",
    "data.new_tokens=128",
    "data.text_tokens=1000000",
    "train.steps=160",
    "train.rows=8",
    "train.seq_len=288",
)
METHODS = (
    *TRAINED,
    f"ppd{FITTED}",
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
    if recipe in TRAINED:
        first = f"{TRAINED[0]}-equal"
        return load_drafter(str(package(recipe, out, f"{recipe}-equal", EQUAL, first)), target)
    if recipe in SEARCHED:
        return load_drafter(str(package(recipe, out)), target)
    part = load_recipe(recipe).drafter
    method = family(part.family)
    return method.build(method.options(**part.options), target.spec, None)


def decode(
    target: Target, drafter: Drafter | None, serve: dict[str, Any], args: Any, heat: float = 0.0
) -> list[Completion]:
    policy = None if drafter is None else make_policy(serve)
    engine = Engine(target, drafter, policy, num_slots=8)
    sampling = {"temperature": heat, "max_new_tokens": args.tokens, "ignore_eos": True}
    prompts = heldout_prompts(target, args.prompts)
    requests = [
        Request(tuple(p.ids), Sampling(**sampling, seed=i), conversation=p.domain)
        for i, p in enumerate(prompts)
    ]
    return engine.run(requests)


def taus(done: list[Completion]) -> dict[str, float]:
    each = [row.stats.tokens / row.stats.rounds for row in done]
    return {"tau": mean(each), "error": stdev(each) / len(each) ** 0.5}


def measure(recipe: str, target: Target, found: dict[str, Any], args: Any) -> dict[str, Any]:
    """The first figure of a method that is missing; none of shapes that its family has not."""
    drafter = drafter_of(recipe, target, args.out)
    shapes = drafter.policies or policies_of(family(drafter.family))
    serve = load_recipe(recipe).serve.model_dump(mode="json")
    if "weights" not in found:
        return {"weights": sum(weight.numel() for weight in drafter.trainable().values())}
    if "chain" not in found:
        if "chain" not in shapes:
            return {"alpha": [], "chain": {}}
        done = decode(target, drafter, CHAIN, args)
        accepted = add_counts(row.stats.accepted_at for row in done)
        alpha = shares(accepted, add_counts(row.stats.tested_at for row in done))
        return {"alpha": alpha, "chain": taus(done)}
    if "tree" not in found:
        is_tree = TREE["policy"] in shapes
        return {"tree": taus(decode(target, drafter, TREE, args)) if is_tree else {}}
    return {"sampled": taus(decode(target, drafter, serve, args, 0.8))}


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


def engine_of(recipe: str, target: Target, out: Path, found: dict[str, Any]) -> Engine:
    """As the recipe serves; the size of a fitted tree is measured once and kept in `found`."""
    if recipe == "plain":
        return Engine(target, None, None)
    name = recipe.removesuffix(FITTED)
    drafter = drafter_of(name, target, out)
    policy = make_policy(load_recipe(name).serve.model_dump(mode="json"))
    if name != recipe:
        assert isinstance(policy, PromptTree), f"{recipe}: only trees of prompt tokens are fitted"
        if "nodes" not in found:
            prompts = [prompt.ids for prompt in heldout_prompts(target, 1)]
            costs = TreeCosts.of(measure_costs(target, drafter, policy, prompts))
            found["nodes"] = policy.fitted(costs).nodes
            print(f"{recipe}: {found['nodes']} rows, {dict(costs.verify)}", file=sys.stderr)
        policy = replace(policy, nodes=found["nodes"])
    return Engine(target, drafter, policy)


def speed(target: Target, methods: list[str], args: Any) -> None:
    """Measures prompt by prompt, and keeps what is there."""
    torch.set_num_threads(1)
    folder = speeds_of(args.out, args.inflate, args.dtype)
    found = {recipe: kept(folder / f"{recipe}.json") or {"prompts": []} for recipe in methods}
    prompts = [tuple(prompt.ids) for prompt in heldout_prompts(target, args.prompts)]
    engines = {recipe: engine_of(recipe, target, args.out, found[recipe]) for recipe in methods}
    engines["plain"] = Engine(target, None, None)
    for engine in engines.values():
        engine.run([Request(prompts[0], Sampling(max_new_tokens=8, ignore_eos=True))])
    for at, prompt in enumerate(prompts):
        request = Request(prompt, Sampling(max_new_tokens=args.tokens, ignore_eos=True))
        order = [each for each in methods if len(found[each]["prompts"]) <= at]
        order = order[at % len(order) :] + order[: at % len(order)] if order else []
        before = Timed.of(engines["plain"], request) if order else None
        for first in range(0, len(order), args.plain_every):
            some = order[first : first + args.plain_every]
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
    print("| method | speed-up | tau, greedy | drafting | tokens/s | same texts |")
    print("|---" * 6 + "|")
    for recipe in methods:
        runs = found[recipe]["prompts"][: args.prompts]
        same = f"{sum(run['same'] for run in runs)} of {len(runs)}"
        print(f"| {recipe} | {speed_up(runs)} | {' | '.join(speed_cells(runs))} | {same} |")


def speeds_of(out: Path, inflate: str | None, dtype: str) -> Path:
    return out / f"speed-{inflate or 'embedded'}-{dtype}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    return plus_minus(mean(values), stdev(values) / len(values) ** 0.5, digits)


def plus_minus(value: float, error: float, digits: int = 2) -> str:
    return f"{short(value, digits)} +- {short(error, digits)}"


def short(value: float, digits: int = 2) -> str:
    """Without the zero in front of the point."""
    return f"{value:.{digits}f}".removeprefix("0") or "0"


def speed_up(runs: Sequence[dict[str, Any]]) -> str:
    """Median and quartiles, and the mean with its standard error."""
    ratios = [run["plain_seconds"] / run["cpu_seconds"] for run in runs]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return f"{short(middle)} [{short(low)}, {short(high)}] | {spread(ratios)}"


def speed_cells(runs: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    """tau, the median share of drafting (wall seconds, which stall), and tokens per CPU second."""
    pairs = [(run["draft_seconds"], run["verify_seconds"]) for run in runs]
    share = median(draft / (draft + verify) for draft, verify in pairs)
    rates = [len(run["tokens"]) / run["cpu_seconds"] for run in runs]
    tau = spread([len(run["tokens"]) / run["rounds"] for run in runs])
    return tau, f"{share:.0%}", rate_cell(rates)


def table(methods: Sequence[str], args: Any) -> None:
    """Everything that was measured, on the embedded target and at the cost of others."""
    folders = [speeds_of(args.out, size, args.dtype) for size in (None, "300m")]
    print("| method | weights | alpha | tau, chain | tree | served | T = 0.8", end="")
    print(" | drafting | tokens/s" * len(folders) + " |\n" + "|---" * (7 + 2 * len(folders)) + "|")
    for recipe in methods:
        runs = kept(folders[0] / f"{recipe}.json").get("prompts")
        cells = [*counted(args.out, recipe), *timed(folders, recipe)]
        cells.insert(4, speed_cells(runs)[0] if runs else "-")
        print(f"| `{recipe}` | {' | '.join(cells)} |")
    print(f"| plain decoding | - | - | - | - | - | - | {' | '.join(plain(folders, methods))} |")
    print("\n| method" + " | speed-up | mean" * len(folders) + " |\n" + "|---" * (1 + 4) + "|")
    for recipe in methods:
        runs = [kept(folder / f"{recipe}.json").get("prompts") for folder in folders]
        print(f"| `{recipe}` | {' | '.join(speed_up(one) if one else '- | -' for one in runs)} |")


def counted(out: Path, recipe: str) -> list[str]:
    """What does not depend on costs."""
    found = kept(out / f"{recipe}.json")
    shapes = [found.get(name) for name in ("chain", "tree", "sampled")]
    taus = [plus_minus(one["tau"], one["error"]) if one else "-" for one in shapes]
    alpha = " ".join(short(a) for a in found.get("alpha", [])[:4]) or "-"
    return [f"{found['weights']:,}" if found else "-", alpha, *taus]


def timed(folders: Sequence[Path], recipe: str) -> list[str]:
    cells = []
    for folder in folders:
        runs = kept(folder / f"{recipe}.json").get("prompts")
        cells += speed_cells(runs)[1:] if runs else ("-", "-")
    return cells


def plain(folders: Sequence[Path], methods: Sequence[str]) -> list[str]:
    """Tokens per CPU second of plain decoding, around the runs of the first method there is."""
    cells = []
    for folder in folders:
        found = (kept(folder / f"{recipe}.json").get("prompts") for recipe in methods)
        runs = next((one for one in found if one), [])
        rates = [len(run["tokens"]) / run["plain_seconds"] for run in runs]
        cells += ("0%", rate_cell(rates)) if rates else ("-", "-")
    return cells


def rate_cell(rates: Sequence[float]) -> str:
    return spread(rates, 0 if mean(rates) >= 100 else 1)


def kept(file: Path) -> dict[str, Any]:
    """The figures of a file; none where there is none."""
    return json.loads(file.read_text()) if file.exists() else {}


def keep(file: Path, found: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))


def quality(target: Target, methods: list[str], args: Any) -> None:
    for recipe in methods:
        found = kept(file := args.out / f"{recipe}.json")
        while "sampled" not in found:
            found |= measure(recipe, target, found, args)
            keep(file, found)
            print(f"{recipe}: {', '.join(found)}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/self"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--speed", action="store_true", help="seconds beside plain decoding")
    parser.add_argument("--plain-every", type=int, default=3, help="methods, with --speed")
    parser.add_argument("--table", action="store_true", help="print what was measured")
    parser.add_argument("--inflate", default=None, help="with --speed: 300m, for example")
    parser.add_argument("--dtype", default="float32", help="with --speed")
    args = parser.parse_args()
    methods = args.methods.split(",")
    if args.table:
        table(methods, args)
        return
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    if args.speed:
        speed(target, methods, args)
    else:
        quality(target, [recipe for recipe in methods if not recipe.endswith(FITTED)], args)
        table(methods, args)


if __name__ == "__main__":
    main()
