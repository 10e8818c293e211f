"""How often is each trained family right? tau and alpha with standard errors, at equal tokens, at
equal processor seconds, and over the amount of data.

Every family is trained for the embedded target on the same rows, with the settings of `specctl
bench-families`, and measured on held-out prompts, greedy and at T = 1, as a chain of five and as
its recipe serves it. tau is counted, not timed, so that a busy machine does no harm; processor
seconds are those of the training process, on one thread. One file a case in OUT: run again, it
goes on.

    python benchmarks/quality.py --out runs/quality --workers 2 --plan     # what it will take
    python benchmarks/quality.py --out runs/quality --workers 2
    python benchmarks/quality.py --out runs/quality --arms seconds         # at equal seconds
    python benchmarks/quality.py --out runs/quality --arms data --families eagle3,small-lm

Families whose paired difference over prompts is below two standard errors from the best of a group
are in its group: they are level.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from specctl import load_drafter, load_target
from specctl.api.train import train_and_package
from specctl.cli.commands.bench_families import TINY, TrainingBudget, chosen, family_recipe
from specctl.drafters import family
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.policies import make_policy, policies_of
from specctl.runtime.sampling.sampling import Sampling
from specctl.train.data.heldout import heldout_prompts
from specctl.train.planning.scaling import share_data

DATA = (125, 250, 500, 1000, 2000)  # prompts of the learning curve
LEADING = ("small-lm", "staged", "moa", "glide", "eagle3", "eagle")
HEATS = {"greedy": 0.0, "sampled": 1.0}
HELD_UNMEASURED = "train.tau_every=1000000"


@dataclass(frozen=True, slots=True)
class Case:
    """A training run and how it is measured."""

    family: str
    arm: str  # tokens, seconds, or data
    seed: int
    steps: int
    prompts: int

    @property
    def name(self) -> str:
        size = f"-{self.prompts}" if self.arm == "data" else ""
        return f"{self.family}-{self.arm}{size}-{self.seed}"


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Trains and measures; the figures of a case."""
    torch.set_num_threads(1)
    sets = (f"train.seed={case.seed}", f"data.prompts={case.prompts}", "train.rows=4",
            HELD_UNMEASURED)  # fmt: skip
    recipe = family_recipe(
        case.family, TrainingBudget(case.family, TINY, case.steps, sets, args.out)
    )
    folder, first = args.out / "runs" / case.name, args.out / "runs" / f"data-{case.prompts}"
    if first.exists() and folder != first:
        share_data([first], folder)
    spent = folder / "processor_seconds.json"  # outlives a kill between training and measuring
    began = time.process_time()
    result = train_and_package(SilentReporter(), recipe, folder, command=sys.argv)
    if not spent.exists():
        spent.write_text(json.dumps(time.process_time() - began))
    assert result.package is not None
    target = load_target("tiny", dtype="float32")
    drafter = load_drafter(str(result.package), target)
    own = make_policy(recipe.serve.model_dump(mode="json"))
    policies = {"served": own}
    if "chain" in (drafter.policies or policies_of(family(case.family))):
        policies["chain"] = make_policy({"policy": "chain", "length": 5})
    held = heldout_prompts(target, args.prompts)
    found: dict[str, Any] = {**asdict(case), "seconds": json.loads(spent.read_text())}
    found["numbers"] = sum(weight.numel() for weight in drafter.trainable().values())
    for shape, policy in policies.items():
        for word, heat in HEATS.items():
            sampling = {"temperature": heat, "max_new_tokens": args.tokens, "ignore_eos": True}
            asked = [
                Request(tuple(p.ids), Sampling(**sampling, seed=i)) for i, p in enumerate(held)
            ]
            done = Engine(target, drafter, policy, num_slots=8).run(asked)
            tested = add_counts(row.stats.tested_at for row in done)
            found[f"{shape} {word}"] = {
                "tau": [row.stats.tokens / row.stats.rounds for row in done],
                "alpha": shares(add_counts(row.stats.accepted_at for row in done), tested),
            }
    return found


def cases(args: argparse.Namespace, known: dict[str, dict[str, Any]]) -> Iterator[Case]:
    """What is to be run, the most telling first."""
    names = chosen(args.families)
    seeds = range(args.seeds)
    if "tokens" in args.arms:
        yield from (Case(n, "tokens", s, args.steps, args.data) for s in seeds for n in names)
    if "seconds" in args.arms:
        spent = {n: known[c]["seconds"] for n in names if (c := f"{n}-tokens-0") in known}
        for name, own in spent.items():
            steps = max(1, round(args.steps * (args.seconds or median(spent.values())) / own))
            yield from (Case(name, "seconds", s, steps, args.data) for s in seeds)
    if "data" in args.arms:
        leading = [name for name in names if name in LEADING]
        yield from (Case(n, "data", 0, args.steps, size) for size in DATA for n in leading)


def grouped(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, dict[str, Any]]]:
    """Rows by falling tau, each with the number of its group."""
    order = sorted(rows, key=lambda row: -mean(row[key]["tau"]))
    found, group, best = [], 0, None
    for row in order:
        taus = row[key]["tau"]
        if best is None or _differs(best, taus):
            group, best = group + 1, taus
        found.append((group, row))
    return found


def _differs(first: Sequence[float], second: Sequence[float]) -> bool:
    apart = [a - b for a, b in zip(first, second, strict=True)]
    return mean(apart) >= 2 * stdev(apart) / len(apart) ** 0.5


def _text(taus: Sequence[float]) -> str:
    return f"{mean(taus):.2f} +- {stdev(taus) / len(taus) ** 0.5:.2f}"


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seeds of one case as one: taus are means over seeds, prompt by prompt."""
    found = dict(rows[0])
    for key, value in rows[0].items():
        if isinstance(value, dict):
            taus = zip(*(row[key]["tau"] for row in rows), strict=True)
            found[key] = {"tau": [mean(each) for each in taus], "alpha": value["alpha"]}
    return found | {"seeds": len(rows), "seconds": mean(row["seconds"] for row in rows)}


def table(rows: Sequence[dict[str, Any]], arm: str) -> str:
    """Markdown of one arm, best first by the greedy tau of what is served."""
    by_case: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["arm"] == arm:
            by_case.setdefault((row["family"], row["prompts"]), []).append(row)
    lines = ["| group | family | numbers | prompts, steps, CPU s, seeds | alpha 1 2 3 "
             "| chain, greedy | chain, T = 1 | served, greedy | served, T = 1 |",
             "|" + "---|" * 9]  # fmt: skip
    for group, row in grouped([pooled(each) for each in by_case.values()], "served greedy"):
        chain = row.get("chain greedy")
        alpha = "-" if chain is None else " ".join(f"{a:.2f}" for a in chain["alpha"][:3])
        taus = (row.get(f"{shape} {word}") for shape in ("chain", "served") for word in HEATS)
        shown = " | ".join("-" if each is None else _text(each["tau"]) for each in taus)
        cost = f"{row['prompts']}, {row['steps']}, {row['seconds']:.0f}, {row['seeds']}"
        lines.append(
            f"| {group} | `{row['family']}` | {row['numbers']:,} | {cost} | {alpha} | {shown} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--families", default="all", help="names, with commas between")
    parser.add_argument("--arms", default="tokens", help="tokens, seconds, data; with commas")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=None, help="else the median of the first")
    parser.add_argument("--data", type=int, default=1000, help="prompts to train on")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--plan", action="store_true", help="say what would be run, and stop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.case is not None:
        case = Case(**json.loads(args.case))
        found = run(case, args)
        (args.out / f"{case.name}.json").write_text(json.dumps(found))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    known = {f.stem: json.loads(f.read_text()) for f in args.out.glob("*.json")}
    wanted = list(cases(args, known))
    missing = [case for case in wanted if case.name not in known]
    each = [row["seconds"] for row in known.values()] or [float("nan")]
    print(f"{len(missing)} of {len(wanted)} cases to run, {args.workers} at once; about "
          f"{mean(each) / 60:.1f} minutes of training each, and as much to measure",
          file=sys.stderr)  # fmt: skip
    if args.plan:
        return
    for size in sorted({case.prompts for case in missing}):
        prepare(args, size)
    began, done = time.time(), []

    def one(case: Case) -> None:
        log = args.out / "logs" / f"{case.name}.log"
        log.parent.mkdir(exist_ok=True)
        words = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
        words += ["--out", str(args.out), "--prompts", str(args.prompts)]
        words += ["--tokens", str(args.tokens)]
        with log.open("w") as file:
            rc = subprocess.run(words, stdout=file, stderr=file).returncode
        done.append(case.name)
        left = (time.time() - began) / len(done) * (len(missing) - len(done)) / 60
        said = "done" if rc == 0 else f"failed ({log})"
        print(f"{len(done)} of {len(missing)}: {case.name} {said}, about {left:.0f} minutes left",
              file=sys.stderr, flush=True)  # fmt: skip

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(one, missing))
    rows = [json.loads(f.read_text()) for f in sorted(args.out.glob("*.json"))]
    if args.json:
        print(json.dumps(rows))
    else:
        for arm in args.arms.split(","):
            print(f"\n{arm}:\n\n{table(rows, arm)}")


def prepare(args: argparse.Namespace, size: int) -> None:
    """The target's answers, written once for all runs on so many prompts."""
    first = args.out / "runs" / f"data-{size}"
    if (first / "finished.json").exists():
        return
    sets = (f"data.prompts={size}", "train.rows=4", HELD_UNMEASURED)
    recipe = family_recipe("medusa", TrainingBudget("medusa", TINY, 1, sets, args.out))
    train_and_package(SilentReporter(), recipe, first, command=sys.argv)


if __name__ == "__main__":
    main()
