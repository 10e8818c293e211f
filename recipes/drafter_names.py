"""Names of drafters on a command line: one, or several joined by `+`, which share the rows."""

from __future__ import annotations

from pathlib import Path


def drafter_names(name: str) -> list[str]:
    """The names of which `name` consists: `runs/eagle3+prompt-lookup` are two drafters, unless a
    folder is called so."""
    if "+" not in name or "\0" in name or Path(name[:1000]).expanduser().exists():
        return [name]
    return name.split("+")
