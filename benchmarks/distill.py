"""The table of draft models: the same target, prompts, rows, steps and shape; one thing differs.

Every row of ROWS is a recipe with fields changed, trained by `specctl train-draft` in OUT/NAME (an
interrupted row resumes; all share the text in OUT/data) and measured as a chain of five, greedy and
at T = 1, on the embedded target and on the cost-inflated one. What is measured is kept in
OUT/distill.json and not measured again. Speeds stand beside plain decoding timed next to them.

    python benchmarks/distill.py --out runs/distill-table
    python benchmarks/distill.py --rows "untrained; kl; adaspec" --steps 200 --inflate none
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.recipes.load import load_recipe
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.target.target import Target
from specctl.train.assemble import build_drafter
from specctl.train.data.prompts.heldout import heldout_prompts

# What every row shares, so that only its own fields differ; --steps and --answers are added.
SHARED = (
    "target.dtype=bfloat16", "vocab.size=2048", "data.prompt_tokens=48",
    "data.new_tokens=96", "data.temperature=0.8", "data.greedy_share=0.5",
    "data.train_on_prompt=true", "data.text_tokens=0", "data.on_policy=0",
    "train.rows=8", "train.seq_len=288", "train.learning_rate=5e-3",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a recipe, the fields that differ, and what it also needs. A pipeline
    keeps its stages' own data and rates, and shares the steps out among them."""

    name: str
    recipe: str = "distillspec"
    sets: tuple[str, ...] = ()
    after: str | None = None
    is_trained: bool = True
    is_pipeline: bool = False


def loss(kind: str, *sets: str) -> tuple[str, ...]:
    return (f"drafter.options.loss={kind}", *sets)


DTYPES = {True: "float32", False: "bfloat16"}  # embedded, inflated
RAW = ("data.regenerate=false", "data.limit_tokens=230400")
STAGES = (
    "vocab.size=2048", "target.dtype=bfloat16", "stages.align.data.prompts={answers}",
    *(f"stages.{stage}.train.steps={{third}}" for stage in ("pretrain", "continue", "align")),
)  # fmt: skip
PRUNED = ("train.learning_rate=2e-3",)

ROWS = (
    Row("untrained", is_trained=False),
    Row("ce, raw text", sets=loss("ce", *RAW)),
    Row("ce, target text", sets=loss("ce")),
    Row("kl, raw text", sets=loss("kl", *RAW)),
    *(Row(kind, sets=loss(kind)) for kind in
      ("kl", "rkl", "jsd", "tv", "lk_alpha", "lk_hybrid")),
    Row("on-policy", sets=("data.on_policy=1.0", *RAW)),
    Row("mixed", sets=("data.on_policy=0.5",)),
    Row("adaspec", sets=("train.select=highest", "train.reference={out}/kl"), after="kl"),
    Row("adaspec, lowest", sets=("train.select=lowest", "train.reference={out}/kl"), after="kl"),
    Row("adaspec, random", sets=("train.select=random",)),
    Row("fastdraft", recipe="fastdraft", sets=STAGES, is_pipeline=True),
    *(Row(f"pruned to {n}, healed", "prune", (f"drafter.options.layers={n}", *PRUNED))
      for n in (1, 2, 4)),
    Row("wide-shallow", sets=("drafter.options.layers=1", "drafter.options.width=256")),
    Row("narrow-deep", sets=("drafter.options.layers=4", "drafter.options.width=128")),
    *(Row(f"vocabulary {size}", sets=(f"vocab.size={size}",))
      for size in (256, 512, 1024, 4096, "null")),  # 2048: every other row
)  # fmt: skip


def fields(row: Row, args: argparse.Namespace) -> list[str]:
    """--set arguments of a row."""
    shared = (
        []
        if row.is_pipeline
        else [*SHARED, f"train.steps={args.steps}", f"data.prompts={args.answers}"]
    )
    quiet = ["train.tau_every=100000", "train.save_every=100"]
    known = {"out": args.out, "answers": args.answers, "third": args.steps // 3}
    return [*shared, *quiet, *(text.format(**known) for text in row.sets)]


def folder(row: Row, args: argparse.Namespace) -> Path:
    return Path(args.out) / row.name.replace(", ", "-").replace(" ", "-")


def trained(row: Row, args: argparse.Namespace) -> Path:
    """The row's package, trained now if it is not there; all rows share the regenerated text."""
    place = folder(row, args)
    if not (place / "package" / "manifest.json").exists():
        shared = Path(args.out) / "data"
        shared.mkdir(parents=True, exist_ok=True)
        place.mkdir(exist_ok=True)
        if not row.is_pipeline and not (place / "data").exists():
            (place / "data").symlink_to(shared.resolve())
        sets = [word for text in fields(row, args) for word in ("--set", text)]
        words = [sys.executable, "-m", "specctl", "train-draft", "--recipe", row.recipe]
        subprocess.run([*words, "--out", str(place), *sets], check=True, stdout=sys.stderr)
    return place / "package"


def drafter_of(row: Row, target: Target, args: argparse.Namespace) -> Drafter:
    if row.is_trained:
        drafter = load_drafter(str(trained(row, args)), target)
    else:
        recipe = load_recipe(row.recipe, [*fields(row, args), "vocab.size=null"])
        drafter = build_drafter(recipe.drafter, recipe.train, target.spec, None)
    return drafter.to(target.device, target.dtype)


def measured(
    drafter: Drafter, target: Target, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Acceptance over all prompts and speed per temperature. The prompts go in `--repeats` groups,
    of which the median counts; plain decoding, whose speed hardly depends on the text, runs the
    first of them just before the drafter does."""
    policy = make_policy({"policy": "chain", "length": args.length})
    found = []
    for temperature in (0.0, 1.0):
        sampling = Sampling(
            temperature=temperature, max_new_tokens=args.tokens, ignore_eos=True, seed=1
        )
        groups = [prompts[first :: args.repeats] for first in range(args.repeats)]
        plain = generate(target, groups[0], sampling=sampling).stats
        drafted = [
            generate(target, group, drafter=drafter, sampling=sampling, policy=policy).stats
            for group in groups
        ]
        speed = statistics.median(stats.tokens_per_second for stats in drafted)
        tested = sum(sum(stats.tested_at) for stats in drafted)
        found.append(
            {
                "target": target.inflated or "embedded",
                "temperature": temperature,
                "alpha": sum(stats.accepted for stats in drafted) / max(tested, 1),
                "tau": sum(s.tokens for s in drafted) / sum(s.rounds for s in drafted),
                "tokens_per_second": speed,
                "speedup": speed / plain.tokens_per_second,
            }
        )
    return found


def markdown(results: dict[str, Any]) -> str:
    """One line a row: alpha and tau once (cost does not change them), speeds for every target."""
    kept = list(results["rows"].values())
    names = list(dict.fromkeys(m["target"] for row in kept for m in row["measured"]))
    speeds = [f"tok/s {name} {setting}" for name in names for setting in ("greedy", "T=1")]
    head = ["row", "alpha greedy", "tau greedy", "alpha T=1", "tau T=1", *speeds]
    lines = [f"Settings: {json.dumps(results['settings'])}", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in kept:
        own = [m for m in row["measured"] if m["target"] == names[0]]
        cells = [f"{m[key]:.3f}" for m in own for key in ("alpha", "tau")]
        cells += [f"{m['tokens_per_second']:.0f} ({m['speedup']:.2f}x)" for m in row["measured"]]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def load_results(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What was measured before, if it was measured in the same way."""
    if file.exists():
        kept = json.loads(file.read_text())
        if kept["settings"] == settings:
            return dict(kept)
        print(f"{file} was measured otherwise; measuring again", file=sys.stderr)
    return {"settings": settings, "rows": {}}


def store(file: Path, results: dict[str, Any]) -> None:
    partial = file.with_name(f".tmp-{file.name}")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(partial, file)


def chosen_rows(wanted: str) -> list[Row]:
    """Rows by name, a row that another one starts from before it."""
    by_name = {row.name: row for row in ROWS}
    names = [n.strip() for n in wanted.split(";")] if wanted else list(by_name)
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"unknown rows {unknown}; known: " + "; ".join(by_name))
    needed = [by_name[n].after for n in names]
    return [row for row in ROWS if row.name in names or row.name in needed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/distill-table")
    parser.add_argument("--rows", default="", help="names separated by ; (all where left out)")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--answers", type=int, default=1600, help="prompts the target answers")
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--inflated-prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inflate", default="300m", help="none: the embedded target only")
    parser.add_argument("--train-only", action="store_true", help="measure in a later run")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{row.name}: {row.recipe} {' '.join(row.sets)}" for row in ROWS))
        return
    sizes = [None] if args.inflate == "none" else [None, args.inflate]
    if args.train_only:
        for row in chosen_rows(args.rows):
            if row.is_trained:
                trained(row, args)
        return
    targets = [load_target("tiny", dtype=DTYPES[size is None], inflate=size) for size in sizes]
    prompts = [list(p.ids) for p in heldout_prompts(targets[0], args.prompts)]
    for target in targets:  # a target's first forwards lay its weights out
        generate(target, prompts[:1], sampling=Sampling(max_new_tokens=16))
    counts = (args.prompts, args.inflated_prompts)
    keys = (
        "steps", "answers", "length", "prompts", "inflated_prompts", "tokens", "repeats", "inflate"
    )  # fmt: skip
    settings = {key: getattr(args, key) for key in keys}
    settings |= {"target": targets[0].fingerprint[:19], "threads": torch.get_num_threads()}
    file = Path(args.out) / "distill.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    results = load_results(file, settings)
    for row in chosen_rows(args.rows):
        if row.name in results["rows"]:
            continue
        print(f"row: {row.name}", file=sys.stderr)
        found = []
        for target, count in zip(targets, counts, strict=False):
            found += measured(drafter_of(row, target, args), target, prompts[:count], args)
        about = {"name": row.name, "recipe": row.recipe, "sets": fields(row, args)}
        results["rows"][row.name] = about | {"measured": found}
        store(file, results)
    print(json.dumps(results) if args.json else markdown(results))


if __name__ == "__main__":
    main()
