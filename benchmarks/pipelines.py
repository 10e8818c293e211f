"""Do the stages of FastDraft and the exits of a sorted draft do what their papers say?

FastDraft: tau by domain after every stage (continuing on code moves the code slice), and after
aligning the same weights on the source's own text instead of the target's answers (worse). Sorted:
tau of every exit against a small-lm of that depth trained alone with the same data and steps, and
of the confidence rule. Trains what is missing; --set changes every training, for a short try.

    python benchmarks/pipelines.py --out runs/pipelines
    python benchmarks/pipelines.py --out /tmp/try --set train.rows=2 --set data.prompts=40 --steps 8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.drafters.sorted_lm import SortedLm
from specctl.recipes.load import load_recipe
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.data.heldout import heldout_prompts

DOMAINS = ("code", "docstring")
CHAIN = {"policy": "chain", "length": 5}


def train(words: list[str], out: Path, given: argparse.Namespace) -> Path:
    """OUT/package of a run, trained now if it is not there."""
    if not (out / "package" / "manifest.json").exists():
        sets = [part for text in given.set for part in ("--set", text)]
        command = [sys.executable, "-m", "specctl", "train-draft", *words, *sets]
        subprocess.run([*command, "--out", str(out)], check=True, stdout=sys.stderr)
    return out / "package"


def tau(target: Target, drafter: Drafter, domain: str, given: argparse.Namespace) -> float:
    """Measured greedily on held-out prompts of one domain."""
    prompts = [p.ids for p in heldout_prompts(target, given.prompts, domain)]
    sampling = Sampling(max_new_tokens=given.tokens)
    made = generate(
        target, prompts, drafter=drafter, sampling=sampling, policy=make_policy(CHAIN), batch=8
    )
    return made.stats.tau


def row(name: str, target: Target, drafter: Drafter, given: argparse.Namespace) -> dict[str, Any]:
    found = {domain: round(tau(target, drafter, domain, given), 4) for domain in DOMAINS}
    print(f"{name:38}" + "".join(f"{value:12.3f}" for value in found.values()), flush=True)
    return {"name": name, **found}


def stages(target: Target, given: argparse.Namespace) -> list[dict[str, Any]]:
    """FastDraft's stages, and the last of them on text that the target did not write."""
    out, recipe = given.out / "fastdraft", load_recipe("fastdraft")
    steps = {name: given.steps or part.train["steps"] for name, part in recipe.stages.items()}
    sets = [
        part
        for name, count in steps.items()
        for part in ("--set", f"stages.{name}.train.steps={count}")
    ]
    last = train(["--recipe", "fastdraft", *sets], out, given)
    align = recipe.stages["align"]
    tokens = align.data["prompts"] * (align.data["prompt_tokens"] + align.data["new_tokens"])
    original = train(
        ["--recipe", "fastdraft", "--init", str(out / "stage-2-continue"), "--set", "stages={}",
         "--set", f"data.limit_tokens={tokens}", "--set", f"train.steps={steps['align']}",
         "--set", f"train.learning_rate={align.train['learning_rate']}"],
        given.out / "original",
        given,
    )  # fmt: skip
    packages = {
        "1 pretrain (text)": out / "stage-1-pretrain" / "package",
        "2 continue (code and text)": out / "stage-2-continue" / "package",
        "3 align (answers of the target)": last,
        "3 align (original text) instead": original,
    }
    return [row(n, target, load_drafter(p, target), given) for n, p in packages.items()]


def exits(target: Target, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Each exit of a sorted draft beside a draft model of that depth, then the rule."""
    recipe, rows = load_recipe("sorted"), []
    steps = ["--set", f"train.steps={given.steps or recipe.train.steps}"]
    package = train(["--recipe", "sorted", *steps], given.out / "sorted", given)
    drafter = load_drafter(package, target)
    assert isinstance(drafter, SortedLm)
    for number, depth in enumerate(drafter.exits):
        alone = ["--recipe", "sorted", *steps, "--set", "drafter.family=small-lm"]
        alone += ["--set", f"drafter.options={{layers: {depth}, loss: kl}}"]
        single = load_drafter(train(alone, given.out / f"depth-{depth}", given), target)
        rows.append(row(f"small-lm of {depth} layers", target, single, given))
        fixed = SortedLm(
            replace(drafter.options, only=number), drafter.spec, drafter.vocab, drafter.lm
        )
        rows.append(row(f"sorted, exit after {depth}", target, fixed, given))
    rows.append(row(f"sorted, threshold {drafter.threshold:g}", target, drafter, given))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs/pipelines"))
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts of each domain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=None, help="of every training; else recipes'")
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE of every recipe")
    parser.add_argument("--only", choices=("stages", "exits"), default=None)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    target = load_target("tiny")
    print(f"{'tau, greedy, chain of 5':38}" + "".join(f"{domain:>12}" for domain in DOMAINS))
    found: dict[str, Any] = {}
    if given.only != "exits":
        found["stages"] = stages(target, given)
    if given.only != "stages":
        found["exits"] = exits(target, given)
    (given.out / "pipelines.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
