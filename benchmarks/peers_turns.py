"""Seconds of a training step beside another trainer's, the two taking their steps in turn.

What peers.py (eagle3) and peers_methods.py (dflash, distill) train, by two processes at once of
which one computes: a machine whose speed changes from minute to minute slows both. The medians of
the steps, and the median of ours over theirs, pair by pair, with its bootstrap interval; the first
two pairs and the last are left out.

    python benchmarks/peers_turns.py --method distill --out runs/turns --steps 24
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np

HERE = Path(__file__).parent
SHORT = ("--tokens", "8", "--seeds", "1")
ONE_RATE = ("--search", "1", "--prompts", "1", "--rates")
# method -> its script and words, our arm and the other's
METHODS = {
    "eagle3": (("peers.py", "--prompts", "2"), "specctl", "speculators"),
    "eagle3-modelopt": (("peers.py", "--prompts", "2"), "specctl", "modelopt, target's rows"),
    "dflash": (("peers_methods.py", "--method", "dflash", *ONE_RATE, "8e-3"),
               "specctl", "speculators"),
    "distill": (("peers_methods.py", "--method", "distill", "--rows", "4", *ONE_RATE, "3e-3"),
                "specctl", "TRL GKD"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/turns"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], help="TRAINER=ENV/bin/python")
    args = parser.parse_args()
    (script, *words), *arms = METHODS[args.method]
    out = (args.out / args.method).resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "turn").write_text("0")
    common = [*words, *SHORT, "--steps", str(args.steps), "--threads", str(args.threads)]
    common += [word for pair in args.python for word in ("--python", pair)]
    running = []
    for own, arm in enumerate(arms):
        command = [sys.executable, str(HERE / script), *common, "--out", str(out / str(own))]
        turns = {"TURN": f"{out / 'turn'}:{own}:{len(arms)}", "OMP_NUM_THREADS": str(args.threads)}
        with (out / f"log-{own}").open("w") as log:
            running.append(subprocess.Popen([*command, "--arms", arm], stdout=log, stderr=log,
                                            env=os.environ | turns))  # fmt: skip
    statuses = [one.wait() for one in running]
    if any(statuses):
        raise SystemExit(f"one of the trainings failed: see {out}/log-*")
    seconds = [one_arm(out / str(own)) for own in range(len(arms))]
    ours, theirs = (np.array(of[2:-1]) for of in seconds)
    ratio, random = ours / theirs, np.random.default_rng(0)
    drawn = np.median(random.choice(ratio, (10_000, len(ratio))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    print(f"{args.method}: {arms[0]} {median(ours):.3f} s a step, {arms[1]} {median(theirs):.3f}, "
          f"ours over theirs {median(ratio):.3f} [{low:.3f}, {high:.3f}], {len(ratio)} pairs, "
          f"{args.threads} threads")  # fmt: skip


def one_arm(folder: Path) -> list[float]:
    """Seconds of each step of the one run there."""
    (about,) = folder.glob("*/about.json")
    return list(json.loads(about.read_text())["seconds"])


if __name__ == "__main__":
    main()
