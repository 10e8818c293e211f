"""What S3D's two ideas bring: layers left out in the middle, and several tokens in one forward.

Trains recipe s3d and its ablations (OUT/runs/ARM, the same steps on the same rows), then drafts
greedily on held-out prompts of the embedded target:

    s3d            half of the layers, three tokens in one forward of them
    no bridge      the same, mask tokens' embeddings alone are trained
    quarter out    two of the eight layers are skipped
    three quarters six of them
    masks alone    no layer is skipped (PaSS, with the bridge's weights)
    skipping alone the same layers, token by token, one token a round: as much drafting as s3d

cost is what a draft costs in forwards of the target; tokens a forward are tau / (1 + cost), and the
last columns compare them with those of s3d, paired over prompts. Seeds are averaged prompt by
prompt; they make the same rows other batches. Figures are written to OUT/ARM-SEED.json; run again,
it goes on.

    python benchmarks/s3d.py --out runs/s3d-arms [--prompts 40] [--seeds 2]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from quality import write
from self_ablations import above, pooled, spread
from self_speculation import decode, package

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.target.target import Target

FIRST, ALONE, SPAN = "s3d", "skipping alone", (2, 3, 4, 5)
ARMS: Mapping[str, tuple[float, Sequence[str]]] = {
    FIRST: (0.5, ()),
    "no bridge": (0.5, ("drafter.options.rank=0",)),
    "quarter out": (0.75, ("drafter.options.skip_layers=2",)),
    "three quarters out": (0.25, ("drafter.options.skip_layers=6",)),
    "masks alone": (1.0, ("drafter.options.skip_layers=0",)),
    ALONE: (0.5, ()),
}


def drafter_of(arm: str, seed: int, target: Target, out: Path) -> Drafter:
    """The arm's drafter, trained now if it is not there; all arms on the same rows."""
    if arm == ALONE:
        found = family("skip-layers")
        options = found.options(skip_attention=SPAN, skip_mlp=SPAN)
        return found.build(options, target.spec, None)
    sets = (f"train.seed={seed}", *ARMS[arm][1])
    folder = package("s3d", out, f"{arm.replace(' ', '-')}-{seed}", sets, f"{FIRST}-0")
    return load_drafter(str(folder), target)


def measured(arm: str, seed: int, target: Target, args: Any) -> dict[str, Any]:
    """tau by prompt, acceptance by position."""
    serve = {"policy": "chain", "length": 1 if arm == ALONE else 3}
    done, _, _ = decode(target, drafter_of(arm, seed, target, args.out), serve, args, 0.0, 8)
    tested = add_counts(row.stats.tested_at for row in done)
    alpha = shares(add_counts(row.stats.accepted_at for row in done), tested)
    return {"tau": [row.stats.tokens / row.stats.rounds for row in done], "alpha": alpha}


def line(arm: str, found: Sequence[dict[str, Any]], firsts: Sequence[dict[str, Any]]) -> str:
    """The row of an arm beside FIRST's figures, seed by seed."""
    alpha = " ".join(f"{one:.2f}" for one in pooled([one["alpha"][:3] for one in found]))
    tau, cost = pooled([one["tau"] for one in found]), ARMS[arm][0]
    gains, first_gains = (
        [[each / (1 + ARMS[name][0]) for each in one["tau"]] for one in rows]
        for name, rows in ((arm, found), (FIRST, firsts))
    )
    less = above(list(zip(gains, first_gains, strict=True)), 3)
    return f"| {arm} | {alpha} | {spread(tau)} | {cost} | {mean(tau) / (1 + cost):.2f} | {less} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/s3d-arms"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    target = load_target("tiny", dtype="float32")
    print("| arm | alpha at 1 2 3 | tau | cost | tokens a forward | less those of s3d |")
    print("|---|---|---|---|---|---|")
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in dict.fromkeys((FIRST, *args.arms)):
        files = [args.out / f"{arm.replace(' ', '-')}-{seed}.json" for seed in range(args.seeds)]
        for seed, file in enumerate(files):
            if not file.exists():
                write(file, measured(arm, seed, target, args))
        found[arm] = [json.loads(file.read_text()) for file in files]
        print(line(arm, found[arm], found[FIRST]), flush=True)


if __name__ == "__main__":
    main()
