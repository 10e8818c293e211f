"""What targets that were trained to draft for themselves gain, and what that cost them.

Every arm is a training run of a recipe (made now if OUT/ARM has none), the same steps on the same
rows: the recipe, and the recipe without its own idea. Then all drafters draft with all targets, the
original among them, greedily on held-out prompts: tau is the mean of the prompts with its standard
error, for the targets' own answers, which differ. Below: KL, agreement and perplexity, as the run
measured them on held-out text. Figures are written to OUT/ARM.json; run again, it goes on.

    python benchmarks/changed_targets.py --out runs/changed [--prompts 40]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.train.data.heldout import heldout_prompts
from specctl.train.metrics import read_log
from specctl.train.run import train_draft

ORIGINAL = "original"
CHAIN = {"policy": "chain"}
TEXT = "train.joint.keep=ce"  # the paper's finetuning, on the text itself
ARMS: Mapping[str, tuple[str, Sequence[str]]] = {
    "noise": ("make-some-noise", ()),
    "text with noise": ("make-some-noise", (TEXT,)),
    "text without noise": (
        "make-some-noise",
        (TEXT, *(NO_NOISE := ("train.joint.noise.span=1", "train.joint.noise.every=1000000"))),
    ),
    "trajectory": ("cllm", ()),
    "random guesses": ("cllm", ("train.joint.trajectory.most=0",)),
    "greedy text": ("cllm", (TEXT, "train.joint.trajectory=null", *NO_NOISE)),
    "early exits": ("layer-skip-trained", ()),
    "early exits, nothing dropped": (
        "layer-skip-trained",
        ("train.joint.early_exit.dropout=0",),
    ),
    "dropped layers alone": ("layer-skip-trained", ("train.joint.early_exit.scale=0",)),
}
DRAFTERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tr-jacobi": ("tr-jacobi", {}),
    "tr-jacobi, nothing copied": ("tr-jacobi", {"ngram": 0}),
    "jacobi": ("jacobi", {"schedule": "jacobi"}),
    "jacobi, blocks of 16": ("jacobi", {"block": 16}),
    "prompt-lookup": ("prompt-lookup", {}),
    "layer-skip, 3 layers": ("layer-skip", {"layers": 3}),
    "layer-skip, 5 layers": ("layer-skip", {"layers": 5}),
}
CHANGE = ("kl", "agreement", "perplexity_before", "perplexity")


class Stderr(SilentReporter):
    """Says what it is told beside the JSON."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def trained(arm: str, out: Path, given: Sequence[str]) -> tuple[str, dict[str, float]]:
    """The folder of an arm's target, and what changed. All arms of a recipe read the rows of its
    first one."""
    recipe, sets = ARMS[arm]
    same = next(name for name, (other, _) in ARMS.items() if other == recipe)
    folder, first = out / arm.replace(" ", "-"), out / same.replace(" ", "-") / "data"
    if first.exists() and not (folder / "data").exists():
        shutil.copytree(first, folder / "data")
    if not (folder / "target" / "README.md").exists():
        train_draft(load_recipe(recipe, sets=[*given, *sets]), folder, reporter=Stderr())
    lines = [x for x in read_log(folder / "metrics.jsonl") if "perplexity" in x]
    return str(folder / "target"), {key: lines[-1][key] for key in CHANGE}


def tau(target: Target, name: str, args: Any) -> dict[str, float]:
    """Mean over the prompts of tokens per round, and its standard error."""
    method, options = DRAFTERS[name]
    found = family(method)
    drafter = found.build(found.options(**options), target.spec, None)
    length = max(args.length, options.get("block", 0))
    serve = {"policy": "direct", "length": length, "nodes": args.nodes}
    policy = make_policy(serve if "direct" in found.policies else {**CHAIN, "length": length})
    sampling = Sampling(temperature=0.0, max_new_tokens=args.tokens, ignore_eos=True)
    prompts = heldout_prompts(target, args.prompts)
    done = Engine(target, drafter, policy, num_slots=8).run(
        [Request(tuple(prompt.ids), sampling) for prompt in prompts]
    )
    each = [row.stats.tokens / row.stats.rounds for row in done]
    return {"tau": mean(each), "error": stdev(each) / len(each) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/changed"))
    parser.add_argument("--arms", nargs="+", default=[ORIGINAL, *ARMS], choices=[ORIGINAL, *ARMS])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for arm in args.arms:
        name, change = ("tiny", {}) if arm == ORIGINAL else trained(arm, args.out, args.set)
        file = args.out / f"{arm.replace(' ', '-')}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        target = load_target(name, dtype="float32")
        for drafter in DRAFTERS:
            if drafter not in found:
                found[drafter] = tau(target, drafter, args)
                file.write_text(json.dumps(found | change, indent=1))
        print(f"{arm}: {json.dumps(change)}")
        for drafter in DRAFTERS:
            print(f"  {drafter:26} {found[drafter]['tau']:.2f} +- {found[drafter]['error']:.2f}")


if __name__ == "__main__":
    main()
