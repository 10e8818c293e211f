"""What code of specctl a call executes: its files, functions and lines, counted by a tracer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = str(Path(__file__).parents[3]) + "/"


@dataclass(frozen=True, slots=True)
class Executed:
    """Distinct files, functions and lines."""

    files: frozenset[str]
    functions: frozenset[CodeType]
    lines: frozenset[tuple[str, int]]

    def counts(self) -> tuple[int, int, int]:
        return len(self.files), len(self.functions), len(self.lines)


def executed(call: Callable[[], Any]) -> Executed:
    """What `call` executes in this thread. A comprehension counts as a part of its function."""
    functions: set[CodeType] = set()
    lines: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not _is_ours(code.co_filename):
            return None
        if event == "call" and not code.co_name.startswith("<"):
            functions.add(code)
        if event == "line":
            lines.add((code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return Executed(frozenset(file for file, _ in lines), frozenset(functions), frozenset(lines))


# What a training registers stays in the process and hands products on, in rounds as well.
REGISTERED = "/train/step/products.py"


def _is_ours(file: str) -> bool:
    """A file of the product: of this checkout and no test, or of an installed package."""
    if file.endswith(REGISTERED):
        return False
    inside = file.removeprefix(ROOT)
    if inside != file:
        return not inside.startswith(("tests/", ".venv/", "benchmarks/"))
    return "/specctl/" in file
