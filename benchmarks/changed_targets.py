"""What targets that were trained to draft for themselves gain, and what that cost them.

Every arm is a training run of a recipe (made now if OUT/ARM has none), the same steps on the same
rows: the recipe, and the recipe without its own idea. Then all drafters draft with all targets, the
original among them, greedily on held-out prompts: tau is the mean of the prompts with its standard
error, for the targets' own answers, which differ; beside it what it is above the original's and
above the recipe's whole idea, paired over prompts. KL, agreement and perplexity are those that the
run measured on held-out text. Seeds are averaged prompt by prompt; they make the same rows other
batches and other additions. Figures are written to OUT/ARM-SEED.json; run again, it goes on.

    python benchmarks/changed_targets.py --out runs/changed [--prompts 40] [--seeds 2]
    python benchmarks/changed_targets.py --arms "early exits" --drafters "layer-skip, 5 layers"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quality import write
from self_ablations import above, pooled, spread

from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.metrics.metrics import read_log
from specctl.train.planning.scaling import share_data
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


def whole(arm: str) -> str:
    """The arm that trains by the same recipe with nothing taken away."""
    return next(name for name, (recipe, _) in ARMS.items() if recipe == ARMS[arm][0])


def place(arm: str, seed: int, out: Path) -> Path:
    return out / f"{arm.replace(' ', '-')}-{seed}"


def trained(arm: str, seed: int, out: Path, given: Sequence[str]) -> tuple[str, dict[str, float]]:
    """The folder of an arm's target, and what changed. All arms of a recipe read the rows of its
    first one."""
    (recipe, sets), folder = ARMS[arm], place(arm, seed, out)
    if not (folder / "target" / "README.md").exists():
        first = place(whole(arm), 0, out)
        share_data([first] if (first / "data").exists() else [], folder)
        made = load_recipe(recipe, sets=[f"train.seed={seed}", *given, *sets])
        train_draft(made, folder, reporter=Stderr())
    lines = [x for x in read_log(folder / "metrics.jsonl") if "perplexity" in x]
    return str(folder / "target"), {key: lines[-1][key] for key in CHANGE}


def tau(target: Target, name: str, args: Any) -> list[float]:
    """Tokens per round, prompt by prompt."""
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
    return [row.stats.tokens / row.stats.rounds for row in done]


def measured(arm: str, seed: int, args: Any) -> dict[str, Any]:
    """tau by drafter and prompt, and what changed; what is missing is trained and measured now."""
    file = place(arm, seed, args.out).with_suffix(".json")
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if missing := [name for name in args.drafters if name not in found]:
        name, change = "tiny", dict[str, float]()
        if arm != ORIGINAL:
            name, change = trained(arm, seed, args.out, args.set)
        target = load_target(name, dtype="float32")
        found |= {drafter: tau(target, drafter, args) for drafter in missing}
        write(file, found | change)
        return found | change
    return found


def line(drafter: str, found: Sequence[dict[str, Any]], others: Mapping[str, Any]) -> str:
    """tau of a drafter, seeds averaged, and what it is above the same of other targets."""
    own = [one[drafter] for one in found]
    words = [f"  {drafter:26} {spread(pooled(own))}"]
    for name, rows in others.items():
        pairs = [(one, rows[min(i, len(rows) - 1)][drafter]) for i, one in enumerate(own)]
        words.append(f"beside {name} {above(pairs)}")
    return "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/changed"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipes")
    args = parser.parse_args()
    original, done = [measured(ORIGINAL, 0, args)], dict[str, list[dict[str, Any]]]()
    print(ORIGINAL)
    for drafter in args.drafters:
        print(line(drafter, original, {}))
    for arm in dict.fromkeys(one for given in args.arms for one in (whole(given), given)):
        done[arm] = [measured(arm, seed, args) for seed in range(args.seeds)]
        others = {ORIGINAL: original}
        if arm != whole(arm):
            others |= {whole(arm): done[whole(arm)]}
        change = {key: [one[key] for one in done[arm]] for key in CHANGE}
        print(f"{arm}: {json.dumps(change)}")
        for drafter in args.drafters:
            print(line(drafter, done[arm], others), flush=True)


if __name__ == "__main__":
    main()
