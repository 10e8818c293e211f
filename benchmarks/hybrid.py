"""Drafters of a trained target with recurrent layers: tau, and the time of a round.

The target is pretrained here (recipe tiny-hybrid: layers of the gated delta rule and of attention),
writes answers, and has an EAGLE-3 drafter and a small Llama trained on these; then both, prompt
lookup and plain decoding are measured in turns. Every step is a command of specctl, whose folder
lies below OUT: a script that was stopped goes on where it stood.

    python benchmarks/hybrid.py --out runs/hybrid

Three more steps leave that target aside: lfm2 and llama distil for the embedded target a hybrid
draft (recipe distill-hybrid) and one of attention alone with as many parameters, steps and texts,
and drafts measures both.

--only names the steps to run, with commas: pretrain, answers, eagle3, distill, bench, lfm2, llama,
drafts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = ("pretrain", "answers", "eagle3", "distill", "bench", "lfm2", "llama", "drafts")
SMALL = "{layers: 1, width: 128, intermediate: 256}"  # of the distilled draft
LEARNING = {"eagle3": ("train.steps=100",), "distill": (
    "train.steps=200", "drafter.init=null", f"drafter.options={SMALL}", "vocab.size=null"),
}  # fmt: skip
# 2.01M parameters; the recipe has 2.02M.
ATTENTION = "{layers: 2, width: 192, heads: 3, kv_heads: 1, intermediate: 552}"


def commands(out: Path) -> dict[str, list[str]]:
    """The words of each step's command."""
    target = ["--target", str(out / "pretrain" / "export")]
    answers = str(out / "answers" / "answers.jsonl")
    found = {
        "pretrain": ["pretrain", "--recipe", "tiny-hybrid", "--out", str(out / "pretrain")],
        "answers": ["regenerate", *target, "--prompts", "240", "--max-new-tokens", "96",
                    "--out", str(out / "answers")],
        "bench": ["bench", *target, "prompt-lookup", str(out / "eagle3"), str(out / "distill"),
                  "--num-prompts", "16", "--repeats", "1",
                  "--temperature", "0", "--temperature", "0.8"],
    }  # fmt: skip
    for name, sets in LEARNING.items():
        learning = ["train-draft", *target, "--recipe", name, "--allow", "recipe"]
        found[name] = [*learning, "--data", answers, "--out", str(out / name)]
        found[name] += [word for each in sets for word in ("--set", each)]
    hybrid = ["train-draft", "--target", "tiny", "--recipe", "distill-hybrid"]
    found["lfm2"] = [*hybrid, "--out", str(out / "lfm2")]
    found["llama"] = [*hybrid, "--set", f"drafter.options={ATTENTION}", "--out", str(out / "llama")]
    found["drafts"] = ["bench", "--target", "tiny", str(out / "lfm2"), str(out / "llama"),
                       "--num-prompts", "16", "--repeats", "1",
                       "--temperature", "0", "--temperature", "0.8"]  # fmt: skip
    return found


def ran(words: Sequence[str]) -> dict[str, Any]:
    """The result of a command; the script ends with it where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "specctl", *words, "--json"], stdout=subprocess.PIPE
    )
    if done.returncode:
        sys.exit(f"specctl {' '.join(words)} failed, exit {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/hybrid"))
    parser.add_argument("--only", default=",".join(STEPS))
    args = parser.parse_args()
    all_commands = commands(args.out)
    for step in args.only.split(","):
        result = ran(all_commands[step])
        (args.out / f"{step}.json").write_text(json.dumps(result, indent=1))
        print(step, json.dumps(result)[:2000])


if __name__ == "__main__":
    main()
