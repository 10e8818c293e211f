"""Every drafter that needs no training, drafts that are models, and families trained alike, on a
model that people have.

Of each drafter, suite and batch one `specctl bench` is run, whose JSON is kept in OUT: what stands
there is not measured again, so the script may be stopped and started as one likes. Each run decodes
plainly, too, in turn with the drafter, and its speed-up is over that.

Families (--train) learn the same answers first, each from a recipe that --time derives, in a run
folder of its own that goes on where it was stopped.

    python benchmarks/real_table.py --target SmolLM2-135M-Instruct.Q4_1.gguf --out runs/table \\
        --suites spec-bench=specbench.jsonl,humaneval=humaneval.jsonl
    python benchmarks/real_table.py --target qwen-1.5b.gguf --out runs/pair --suites ... \\
        --drafters prompt-lookup,qwen-0.5b.gguf
    specctl regenerate --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --data prompts.jsonl --prompts 1500 --out runs/answers
    python benchmarks/real_table.py --target SmolLM2-135M-Instruct.Q4_1.gguf --out runs/trained \\
        --suites ... --train eagle3,medusa,dflash --data runs/answers/answers.jsonl --time 15m
    python benchmarks/real_table.py --out runs/table --table
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from specctl.drafters import families

# Ways that are no families: decisions over several, and combinations.
BESIDES = ("auto", "quantspec+prompt-lookup")


def untrained() -> list[str]:
    return [*BESIDES, *sorted(name for name, each in families().items() if not each.trainable)]


def measured(command: list[str], seconds: float) -> dict[str, Any]:
    """The result of a `specctl bench`, or why there is none."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "specctl", *command, "--json"],
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"missing": f"took more than {seconds:.0f} s"}
    try:
        said = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = {"error": {"what": done.stderr[-400:]}}
    if done.returncode:
        return {
            "missing": ". ".join(
                said["error"][k] for k in ("what", "found") if said["error"].get(k)
            )
        }
    return {**said["result"], "command": command, "took": time.monotonic() - began}


def trained(args: argparse.Namespace) -> list[str]:
    """The run folders of the families to train; those that failed are left out and named."""
    folders = []
    for name in filter(None, args.train.split(",")):
        family, _, change = name.partition(":")
        folder = args.out / name.replace(":", "-").replace("=", "-")
        command = ["train-draft", "--recipe", family, "--target", args.target]
        command += ["--out", str(folder), *(["--set", change] if change else [])]
        command += ["--data", args.data, "--time", args.time]
        command += ["--set", "data.features=offline"]
        command += ["--set", f"data.features_at={args.out / 'features'}"]
        command += [word for one in args.set for word in ("--set", one)]
        done = subprocess.run([sys.executable, "-m", "specctl", *command])
        if done.returncode:
            print(f"{name}: not trained, exit code {done.returncode}", flush=True)
        else:
            folders.append(str(folder))
    return folders


def label(drafter: str) -> str:
    """What a drafter is called in the table: a folder's name is whole, with its dots."""
    return Path(drafter).name.removesuffix(".gguf")


def cell(row: dict[str, Any]) -> str:
    spread = row["speedup_error"]
    return f"{row['speedup']:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")


def table(out: Path) -> str:
    """Of every drafter tau and speed-up by suite, batch and temperature."""
    found: dict[str, dict[str, Any]] = {}
    columns: list[str] = []
    missing: dict[str, str] = {}
    for path in sorted(out.glob("*.json")):
        kept = json.loads(path.read_text())
        if "missing" in kept:
            missing[kept["drafter"]] = kept["missing"]
            continue
        for row in kept["rows"]:
            column = f"{kept['suite']}, batch {kept['batch']}, {row['setting']}"
            columns += [column] if column not in columns else []
            if row["name"] != "plain":
                found.setdefault(kept["drafter"], {})[column] = row
    lines = ["| |" + " |".join(f" {column}: tau | times plain " for column in columns) + "|"]
    lines.append("|---|" + "---|---|" * len(columns))
    for name, rows in found.items():
        cells = [
            f" {rows[column]['tau']:.2f} | {cell(rows[column])} |" if column in rows else " | |"
            for column in columns
        ]
        lines.append(f"| {name} |" + "".join(cells))
    return "\n".join([*lines, *(f"\n{name}: {why}" for name, why in missing.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suites", default="", help="NAME=PATH, with commas")
    parser.add_argument("--drafters", default=None, help="else all that need no training")
    parser.add_argument(
        "--train",
        default="",
        help="families to train first, with commas, each with or without :FIELD=VALUE",
    )
    parser.add_argument("--data", help="answers that all of them learn")
    parser.add_argument("--time", default="15m", help="of the training of each")
    parser.add_argument("--set", action="append", default=[], help="field of every recipe")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--limit", type=int, default=2, help="questions of a category")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=600, help="at most for a run")
    parser.add_argument("--table", action="store_true", help="print what is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.table:
        print(table(args.out))
        return
    if args.target is None or (args.train and args.data is None):
        parser.error("--target is needed, and --data with --train")
    drafters = trained(args)
    if args.drafters is not None:
        drafters += filter(None, args.drafters.split(","))
    elif not args.train:
        drafters = untrained()
    if twice := {each for each in drafters if [*map(label, drafters)].count(label(each)) > 1}:
        parser.error(f"these would have one row: {', '.join(sorted(twice))}")
    for suite in filter(None, args.suites.split(",")):
        for batch in args.batches.split(","):
            for drafter in drafters:
                name = suite.partition("=")[0]
                path = args.out / f"{name}-{batch}-{label(drafter)}.json"
                if path.exists():
                    continue
                command = ["bench", drafter, "--target", args.target, "--suite", suite]
                command += ["--limit", str(args.limit), "--max-new-tokens", str(args.tokens)]
                command += ["--repeats", "1", "--batch", batch, "--dtype", args.dtype]
                for temperature in args.temperatures.split(","):
                    command += ["--temperature", temperature]
                found = measured(command, args.seconds)
                kept = {**found, "drafter": label(drafter), "suite": name, "batch": batch}
                part = path.with_suffix(".part")
                part.write_text(json.dumps(kept, indent=1))
                part.rename(path)
                print(f"{path.name}: {found.get('missing', 'done')}", flush=True)
    print(table(args.out))


if __name__ == "__main__":
    main()
