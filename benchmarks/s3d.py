"""What S3D's two ideas bring: layers left out in the middle, and several tokens in one forward.

Trains recipe s3d and its ablations (OUT/runs/ARM, the same steps on the same rows), then drafts
greedily on held-out prompts of the embedded target:

    s3d            half of the layers, three tokens in one forward of them
    no bridge      the same, mask tokens' embeddings alone are trained
    quarter out    two of the eight layers are skipped
    three quarters six of them
    masks alone    no layer is skipped (PaSS, with the bridge's weights)
    skipping alone the same layers, token by token, one token a round: as much drafting as s3d

cost is what a draft costs in forwards of the target, gain is tau / (1 + cost): tokens a forward.
Figures are written to OUT/ARM.json; run again, it goes on.

    python benchmarks/s3d.py --out runs/s3d-arms [--prompts 40]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from self_speculation import decode, taus

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.target.target import Target

ALONE, SPAN = "skipping alone", (2, 3, 4, 5)
ARMS: Mapping[str, tuple[float, Sequence[str]]] = {
    "s3d": (0.5, ()),
    "no bridge": (0.5, ("drafter.options.rank=0",)),
    "quarter out": (0.75, ("drafter.options.skip_layers=2",)),
    "three quarters out": (0.25, ("drafter.options.skip_layers=6",)),
    "masks alone": (1.0, ("drafter.options.skip_layers=0",)),
    ALONE: (0.5, ()),
}


def drafter_of(arm: str, target: Target, out: Path) -> Drafter:
    """The arm's drafter, trained now if it is not there. The seed makes all arms the same rows."""
    if arm == ALONE:
        found = family("skip-layers")
        options = found.options(skip_attention=SPAN, skip_mlp=SPAN)
        return found.build(options, target.spec, None)
    folder = out / "runs" / arm.replace(" ", "-")
    if not (folder / "package" / "manifest.json").exists():
        sets = [word for one in ARMS[arm][1] for word in ("--set", one)]
        words = ["train-draft", "--recipe", "s3d", "--out", str(folder), *sets]
        subprocess.run([sys.executable, "-m", "specctl", *words], check=True, stdout=sys.stderr)
    return load_drafter(str(folder / "package"), target)


def measured(arm: str, target: Target, args: Any) -> dict[str, Any]:
    """tau with its standard error over the prompts, acceptance by position, cost and gain."""
    drafter, cost = drafter_of(arm, target, args.out), ARMS[arm][0]
    serve = {"policy": "chain", "length": 1 if arm == ALONE else 3}
    done, _, _ = decode(target, drafter, serve, args, 0.0, 8)
    found = taus(done)
    tested = add_counts(row.stats.tested_at for row in done)
    alpha = shares(add_counts(row.stats.accepted_at for row in done), tested)
    return found | {"alpha": alpha, "cost": cost, "gain": found["tau"] / (1 + cost)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/s3d-arms"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    target = load_target("tiny", dtype="float32")
    args.out.mkdir(parents=True, exist_ok=True)
    print("| arm | alpha at 1 2 3 | tau | cost | tokens a forward |")
    print("|---|---|---|---|---|")
    for arm in args.arms:
        file = args.out / f"{arm.replace(' ', '-')}.json"
        if not file.exists():
            file.write_text(json.dumps(measured(arm, target, args)))
        row = json.loads(file.read_text())
        alpha = " ".join(f"{a:.2f}" for a in row["alpha"][:3])
        tau = f"{row['tau']:.2f} +- {row['error']:.2f}"
        print(f"| {arm} | {alpha} | {tau} | {row['cost']} | {row['gain']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
