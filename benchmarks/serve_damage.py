"""Weights of a drafter that are damaged on disk: before the server starts, and while it serves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from proof_common import Check, checked
from serve_common import NAME, TEXT, Server, serve_process, tiny_target

from specctl.drafters import families
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import WEIGHTS

BODY = {"prompt": "def f(x):\n    return", "max_tokens": 24, "temperature": 0.9, "seed": 5}


def write_drafter(out: Path) -> Path:
    """A package of an untrained small model: what it drafts is seldom right, never missed."""
    target, family = tiny_target(), families()["small-lm"]
    torch.manual_seed(0)
    options = family.options(layers=1, width=32, heads=2)
    drafter: Any = family.build(options, target.spec, None)
    about: dict[str, Any] = {"serve": {"policy": "chain", "length": 3}, "acceptance": None}
    about |= {"recipe_digest": "0" * 64, "command": ["specctl", "train-draft"]}
    save_package(drafter, target, out, **about)
    return out


def _overwrite(weights: Path) -> None:
    with weights.open("r+b") as held:
        held.seek(1024)
        held.write(b"\xff" * (weights.stat().st_size - 1024))


def _truncate(weights: Path) -> None:
    with weights.open("r+b") as held:
        held.truncate(0)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "overwritten": _overwrite,
    "cut to nothing": _truncate,
    "deleted": Path.unlink,
}


def damage_checks(folder: Path) -> list[Check]:
    """Answers stay what they were; a server that would start from damage says which file."""
    with serve_process(folder, "--draft", "none") as server:
        wanted = server.hear(TEXT, BODY).json()["choices"]
    package = write_drafter(folder / "package")
    flags = ("--draft", str(package), "--batching", "fixed")
    with serve_process(folder, *flags) as server:
        told = [_fault(server, wanted, "before")]
        for name, damage in DAMAGES.items():
            damage(package / WEIGHTS)
            told.append(_fault(server, wanted, name))
    return [
        checked("weights damaged while they serve: answers exact", told, len(DAMAGES)),
        checked("a server is not started on damage", [_start_fault(folder)]),
    ]


def _fault(server: Server, wanted: Any, name: str) -> str | None:
    assert server.process is not None
    try:
        found = server.hear(TEXT, BODY)
    except ConnectionError:
        return f"{name}: the process is gone, {server.process.poll()}"
    if found.status != 200 or found.json()["choices"] != wanted:
        return f"{name}: {found.status} {found.body[:200]!r}"
    return None


def _start_fault(folder: Path) -> str | None:
    package = write_drafter(folder / "damaged")
    _overwrite(package / WEIGHTS)
    words = [sys.executable, "-m", "specctl", "serve", "--target", NAME, "--draft", str(package)]
    done = subprocess.run([*words, "--port", "0"], capture_output=True, timeout=240)
    said = done.stderr.decode()
    is_right = done.returncode not in (0, 1) and WEIGHTS in said and "Traceback" not in said
    return None if is_right else f"exit code {done.returncode}: {said[-300:]}"
