"""What would be published: wheel and sdist built, checked, and tried in environments that hold
nothing else.

    python benchmarks/dist_check.py
    python benchmarks/dist_check.py --pythons python3.11,python3.12,python3.13 --minutes 1

1. `python -m build` makes the sdist, and the wheel out of the sdist.
2. `twine check --strict` reads the metadata; the wheel's files are compared with the checkout's.
3. For every interpreter: a new environment, torch (the CPU build if there is one), the wheel,
   `pip check`.
4. There, in an empty folder and without a checkout on the path: the version, the recipes, a text
   drafted and compared with plain decoding, and `specctl quickstart --minutes N` to its end.

The rows are printed and kept in INTO/dist.json; 1 if any of them failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from environments import made
from install_matrix import NotInstalled, install_cpu_torch, pip

ROOT = Path(__file__).parents[1]
TORCH = "2.13.0"
DATA = (
    ".yaml",
    ".json",
    ".jsonl",
    ".safetensors",
    ".cpp",
    ".h",
    ".html",
    ".css",
    ".js",
    ".txt",
    ".md",
    ".typed",
)
DRAFTED = ("generate", "--draft", "prompt-lookup", "--compare", "import os", "--json")


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was checked."""

    python: str
    what: str
    passed: bool
    said: str
    seconds: float


def main() -> int:
    """Build, check, and try it with every interpreter."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pythons", default=sys.executable, help="interpreters, by commas")
    parser.add_argument("--minutes", type=float, default=1.0, help="of quickstart; 0: leave it out")
    parser.add_argument("--into", type=Path, default=Path("runs/dist"))
    given = parser.parse_args()
    into = given.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        shown = "pass" if row.passed else "FAIL"
        print(f"{row.python:8} {row.what:24} {shown}  {row.seconds:5.0f} s  {row.said}", flush=True)
        (into / "dist.json").write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")

    wheel = built(into, tell)
    for python in given.pythons.split(",") if wheel is not None else ():
        assert wheel is not None
        tried(python, wheel, into, given.minutes, tell)
    return int(not all(row.passed for row in rows))


def built(into: Path, tell: Callable[[Row], None]) -> Path | None:
    """The wheel; None where nothing was built."""
    python = made(into / "tools", ["build", "twine"])
    shutil.rmtree(into / "dist", ignore_errors=True)
    tell(_ran("-", "build", [python, "-m", "build", "--outdir", str(into / "dist"), str(ROOT)]))
    files = sorted((into / "dist").glob("specctl_toolkit-*"))
    if len(files) != 2:
        return None
    tell(_ran("-", "twine check", [python, "-m", "twine", "check", "--strict", *map(str, files)]))
    wheel = next(file for file in files if file.suffix == ".whl")
    missing = sorted(_tracked() - set(zipfile.ZipFile(wheel).namelist()))
    said = f"lacks {', '.join(missing[:5])}" if missing else f"{wheel.stat().st_size / 1e6:.1f} MB"
    tell(Row("-", "files of the wheel", not missing, said, 0.0))
    return wheel


def _tracked() -> set[str]:
    """The names that the checkout's own files have in a wheel."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    rooms = {link.name for link in (ROOT / "src" / "specctl").iterdir() if link.is_symlink()}
    return {
        f"specctl/{name}"
        for name in listed.stdout.splitlines()
        if name.split("/")[0] in rooms and name.endswith((".py", *DATA))
    }


def tried(
    python: str, wheel: Path, into: Path, minutes: float, tell: Callable[[Row], None]
) -> None:
    """The wheel in an environment of that interpreter."""
    found = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                           capture_output=True, text=True)  # fmt: skip
    name = found.stdout.strip()
    if found.returncode != 0:
        tell(Row(python, "interpreter", False, "does not start", 0.0))
        return
    folder, start = into / f"python-{name}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    inside = folder / "bin" / "python"
    try:
        _install_torch(inside)
        pip(inside, f"{wheel}[plots]")
    except NotInstalled as why:
        tell(Row(name, "install", False, str(why), time.monotonic() - start))
        return
    tell(Row(name, "install", True, wheel.name, time.monotonic() - start))
    program = str(folder / "bin" / "specctl")
    tell(_ran(name, "pip check", [str(inside), "-m", "pip", "check"]))
    with tempfile.TemporaryDirectory() as empty:
        for words in (("--version",), ("recipes", "ls"), DRAFTED):
            tell(_ran(name, f"specctl {words[0]}", [program, *words], empty))
        if minutes > 0:
            quick = [program, "quickstart", "--minutes", str(minutes)]
            tell(_ran(name, "specctl quickstart", quick, empty))


def _install_torch(python: Path) -> None:
    """The CPU build; where there is none for this interpreter, the default build."""
    try:
        install_cpu_torch(python, TORCH)
    except NotInstalled:
        pip(python, f"torch=={TORCH}")


def _ran(python: str, what: str, words: Sequence[str], cwd: str | None = None) -> Row:
    """One command; its last line, or the last of its errors."""
    start = time.monotonic()
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True)
    text = ran.stdout.strip() if ran.returncode == 0 else (ran.stderr or ran.stdout).strip()
    last = (text.splitlines() or [""])[-1]
    return Row(python, what, ran.returncode == 0, last[:100], round(time.monotonic() - start, 1))


if __name__ == "__main__":
    sys.exit(main())
