"""Checkpoints that were found damaged: set aside under another name, never forgotten. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

PREFIX = "damaged-"


def set_aside(folder: Path) -> list[Path]:
    """Those in a folder of checkpoints, by name."""
    return sorted(folder.glob(f"{PREFIX}step*"))


def put_aside(checkpoint: Path) -> None:
    """Set a checkpoint aside, in the place of an earlier one of the same step."""
    aside = checkpoint.with_name(PREFIX + checkpoint.name)
    if aside.exists():
        shutil.rmtree(aside)
    checkpoint.rename(aside)
