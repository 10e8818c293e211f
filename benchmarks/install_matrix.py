"""The contract tests under other versions of torch and transformers, each pair in an environment of
its own.

    python benchmarks/install_matrix.py --torch 2.13.0 --transformers 5.10.4,5.19.0,newest
    python benchmarks/install_matrix.py --torch 2.9.1,2.13.0,newest

An environment is made once (INTO/torch-X-transformers-Y) and used again. torch is the CPU build,
and every later install is bound to it, so that no package brings a CUDA build along; an environment
in which a package of CUDA is found all the same counts as failed. Where no CPU build of a version
can be had, the pair is reported as not run. Every other dependency is the newest that pip finds:
that is what somebody gets who installs specctl beside an engine. The rows are printed and kept in
INTO/matrix.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEWEST = "newest"
TESTS = (
    "tests/drafters/test_contract.py",
    "tests/models",
    "tests/runtime/target",
    "tests/export/test_hf_format.py",
    "tests/recipes",
)


class NotInstalled(Exception):
    """What pip could not give."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pair: what was installed, and what the tests said. `passed` is None if they never ran."""

    torch: str
    transformers: str
    passed: bool | None
    said: str
    seconds: float


def main() -> int:
    """Run every pair; 1 if one of those that ran failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--torch", default="2.9.1,2.13.0,newest", help="versions, or newest")
    parser.add_argument(
        "--transformers", default="5.10.4,5.19.0,newest", help="versions, or newest"
    )
    parser.add_argument("--into", type=Path, default=Path("runs/matrix"))
    parser.add_argument("--tests", nargs="*", default=list(TESTS))
    given = parser.parse_args()
    pairs = [(t, f) for t in given.torch.split(",") for f in given.transformers.split(",")]
    rows = []
    for torch, transformers in pairs:
        rows.append(run(given.into.resolve(), torch, transformers, given.tests))
        shown = {True: "pass", False: "FAIL", None: "not run"}[rows[-1].passed]
        print(
            f"{rows[-1].torch:16} {rows[-1].transformers:10} {shown:8} {rows[-1].said}", flush=True
        )
        table = json.dumps([asdict(row) for row in rows], indent=1)
        (given.into / "matrix.json").write_text(table + "\n", encoding="utf-8")
    return int(any(row.passed is False for row in rows))


def run(into: Path, torch: str, transformers: str, tests: list[str]) -> Row:
    """The row of one pair."""
    start, folder = time.monotonic(), into / f"torch-{torch}-transformers-{transformers}"
    try:
        python = environment(folder, torch, transformers)
    except NotInstalled as why:
        return Row(torch, transformers, None, str(why), time.monotonic() - start)
    found = versions(python)
    cuda = sorted(name for name in found if name.startswith(("nvidia-", "cuda-")))
    pair = (found["torch"], found["transformers"])
    if cuda or not found["torch"].endswith("+cpu"):
        said = f"not a CPU environment: torch {found['torch']}, {', '.join(cuda)[:80]}"
        return Row(*pair, False, said, time.monotonic() - start)
    words = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    paths = {"PYTHONPATH": str(ROOT / "src"), "TOKENIZERS_PARALLELISM": "false"}
    ran = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True
    )
    (folder / "tests.log").write_text(ran.stdout + ran.stderr, encoding="utf-8")
    last = (ran.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    said = last if ran.returncode == 0 else f"{last}; {folder / 'tests.log'}"
    return Row(*pair, ran.returncode == 0, said, time.monotonic() - start)


def environment(folder: Path, torch: str, transformers: str) -> Path:
    """The interpreter of an environment that holds the pair and all that the tests need."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    install_cpu_torch(python, torch)
    pins = folder / "pins.txt"
    lines = [f"torch=={versions(python)['torch']}"]
    lines += [] if transformers == NEWEST else [f"transformers=={transformers}"]
    pins.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pip(python, "-c", str(pins), *requirements())
    ready.touch()
    return python


def install_cpu_torch(python: Path, version: str) -> None:
    """The CPU build from the indexes that pip knows here, else from PyTorch's own."""
    wanted = "torch" if version == NEWEST else f"torch=={version}+cpu"
    known = [] if version == NEWEST else [()]  # `newest` of another index would be a CUDA build
    for where in (*known, ("--index-url", CPU_INDEX)):
        try:
            pip(python, *where, wanted)
        except NotInstalled as error:
            why = str(error)
        else:
            return
    raise NotInstalled(f"no CPU build of torch {version} can be had here: {why}")


def requirements() -> list[str]:
    """What pyproject.toml asks for, with the tools of its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"]]


def pip(python: Path, *words: str) -> None:
    """Install into that environment; what pip said last is the reason if it could not."""
    begun = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    ran = subprocess.run([*begun, *words], capture_output=True, text=True)
    if ran.returncode != 0:
        errors = re.findall(r"^ERROR: (.*)$", ran.stderr, re.MULTILINE)
        raise NotInstalled((errors or ["pip failed"])[-1][:160])


def versions(python: Path) -> dict[str, str]:
    """Name -> version of every distribution in that environment."""
    ran = subprocess.run(
        [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {entry["name"].lower(): entry["version"] for entry in json.loads(ran.stdout)}


if __name__ == "__main__":
    sys.exit(main())
