"""A checkpoint's own module for multi-token prediction: as it is loaded, and tuned.

The checkpoint is the small random GLM-4.5 of mtp_checkpoint.py, made now if OUT/glm has none. Its
module is tuned by recipe glm-4.5-mtp on few rows, three steps unrolled as FastMTP does and one step
deep as modules are published; then each drafts greedily in chains of three on held-out prompts.
Printed: acceptance by place, tau with its standard error over prompts, and tau less that of three
steps, paired over prompts, each prompt's figures being means over seeds (which make the same rows
other batches). Figures are written to OUT/ARM-SEED.json; run again, it goes on.

    python benchmarks/mtp_tune.py --out runs/mtp-tune [--seeds 2] [--steps 60] [--prompts 40]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_checkpoint import checkpoint
from quality import write
from self_ablations import above, pooled, spread
from self_speculation import decode

from specctl import load_drafter, load_target
from specctl.api.train import train_and_package
from specctl.core.drafter import Drafter
from specctl.recipes.load import load_recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.target.mtp_checkpoint import own_module
from specctl.runtime.target.target import Target
from specctl.train.planning.scaling import share_data

LOADED, THREE = "as loaded", "three steps unrolled"
ARMS: Mapping[str, Sequence[str]] = {
    THREE: (),
    "one step": ("drafter.options.ttt_steps=1",),
    LOADED: (),
}
CHAIN = {"policy": "chain", "length": 3}
SMALL = (
    "target.dtype=float32", "data.source=corpus", "data.prompts=200", "data.prompt_tokens=48",
    "data.new_tokens=96", "train.seq_len=288", "train.rows=4", "train.learning_rate=1e-3",
    "train.tau_every=1000000",
)  # fmt: skip


def drafter_of(arm: str, seed: int, target: Target, args: Any) -> Drafter:
    """The module of the checkpoint, tuned now if the arm says so and it is not there."""
    if arm == LOADED:
        return own_module(target)
    folder = args.out / "runs" / f"{arm.replace(' ', '-')}-{seed}"
    if not (folder / "package" / "manifest.json").exists():
        first = args.out / "runs" / f"{THREE.replace(' ', '-')}-0"
        share_data([first] if (first / "data").exists() else [], folder)
        sets = (f"target.name={args.out / 'glm'}", f"train.steps={args.steps}", *SMALL, *ARMS[arm])
        recipe = load_recipe("glm-4.5-mtp", sets=[*sets, f"train.seed={seed}"])
        train_and_package(SilentReporter(), recipe, folder, command=sys.argv)
    return load_drafter(str(folder / "package"), target)


def measured(arm: str, seed: int, target: Target, args: Any) -> dict[str, Any]:
    """tau by prompt, acceptance by place."""
    done, _, _ = decode(target, drafter_of(arm, seed, target, args), CHAIN, args, 0.0, 8)
    tested = add_counts(row.stats.tested_at for row in done)
    alpha = shares(add_counts(row.stats.accepted_at for row in done), tested)
    return {"tau": [row.stats.tokens / row.stats.rounds for row in done], "alpha": alpha}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mtp-tune"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    args.out = args.out.resolve()
    if not (args.out / "glm" / "config.json").exists():
        checkpoint(args.out / "glm")
    target = load_target(str(args.out / "glm"), dtype="float32")
    print("| module | alpha at 1 2 3 | tau | less that of three steps |")
    print("|---|---|---|---|")
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in ARMS:
        found[arm] = []
        for seed in range(args.seeds):
            file = args.out / f"{arm.replace(' ', '-')}-{seed}.json"
            if not file.exists():
                write(file, measured(arm, seed, target, args))
            found[arm].append(json.loads(file.read_text()))
        own, three = ([one["tau"] for one in found[name]] for name in (arm, THREE))
        alpha = " ".join(f"{one:.2f}" for one in pooled([one["alpha"] for one in found[arm]]))
        less = above(list(zip(own, three, strict=True)))
        print(f"| {arm} | {alpha} | {spread(pooled(own))} | {less} |", flush=True)


if __name__ == "__main__":
    main()
