"""What learning together brings and costs: heads alone, heads with their target, and ablations.

Every arm starts alike and takes the same steps on the same rows: Medusa-1 (the target stays), the
recipe medusa-2, the same without the target's own term (it drifts), and with the text instead of
its own distribution as that term. Tau is measured with the target that each arm leaves behind, on
the same held-out prompts; KL, agreement and perplexity compare that target with the original.
Prints JSON.

    python benchmarks/medusa2.py --out runs/medusa2
    python benchmarks/medusa2.py --out runs/medusa2-eagle3 --set drafter.family=eagle3 --steps 80
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specctl.recipes.load import load_recipe
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.train.metrics.metrics import read_log
from specctl.train.run import train_draft

ARMS: Mapping[str, Sequence[str]] = {
    "heads alone": ["train.joint=null"],
    "joint": [],
    "joint, no own term": ["train.joint.keep=none"],
    "joint, text as own term": ["train.joint.keep=ce"],
}
FIGURES = ("kl", "agreement", "perplexity_before", "perplexity", "tokens")


class Stderr(SilentReporter):
    """Says what it is told beside the JSON."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def run_arm(name: str, given: Sequence[str], out: Path, first: Path, reporter: Reporter) -> Any:
    """One arm in a folder of its own, on the rows of the first one."""
    folder = out / name.replace(",", "").replace(" ", "-")
    if first.exists() and not (folder / "data").exists():
        shutil.copytree(first, folder / "data")
    recipe = load_recipe("medusa-2", sets=[*given, *ARMS[name]])
    reporter.say(f"-- {name}")
    result = train_draft(recipe, folder, reporter=reporter)
    lines = read_log(folder / "metrics.jsonl")
    measured = [line for line in lines if "measured_alpha" in line]
    best = max(measured, key=lambda line: float(line["tau"]))
    changes = [line for line in lines if "perplexity" in line]
    same = {"kl": 0.0, "agreement": 1.0}
    change = {key: changes[-1][key] for key in FIGURES} if changes else same
    return {"arm": name, "tau": result.tau, "alpha": best["measured_alpha"], **change}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/medusa2"))
    parser.add_argument("--steps", type=int, help="of every arm; else the recipe's")
    parser.add_argument("--tau-prompts", type=int, default=32)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe")
    args = parser.parse_args()
    given = [*args.set, f"train.tau_prompts={args.tau_prompts}"]
    if args.steps is not None:
        given.append(f"train.steps={args.steps}")
    first = args.out / args.arms[0].replace(",", "").replace(" ", "-") / "data"
    rows = [run_arm(name, given, args.out, first, Stderr()) for name in args.arms]
    print(json.dumps({"settings": given, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
