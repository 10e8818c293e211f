"""The lines of a metrics log. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_lines(text: str) -> list[dict[str, Any]]:
    """One object a line; a line torn by a kill is left out."""
    lines: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics log; a last line torn by a kill is left out."""
    return parse_lines(path.read_text())
