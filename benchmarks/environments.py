"""Environments of engines, for the benchmarks that run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def made(folder: Path, packages: Sequence[str], unwanted: Sequence[str] = ()) -> str:
    """The Python of an environment with these packages, installed in that order (those of one entry
    together), and without those; made if it is not whole yet."""
    python, mark = folder / "bin" / "python", folder / ".whole"
    if not mark.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for package in packages:
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", *package.split()], check=True
            )
        for package in unwanted:
            subprocess.run([str(python), "-m", "pip", "uninstall", "-y", package], check=True)
        mark.touch()
    return str(python)
