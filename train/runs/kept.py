"""What an unfinished job has left in its folder, for the same command to go on from. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.core.messages.printable import counted
from specctl.train.saving.integrity import saved_steps

if TYPE_CHECKING:
    from specctl.recipes.schema import DataPart

WRITTEN = {  # the journals of what a target has written
    "data/questions-*/answers-*.bin": "written questions",
    "data/answers-*/answers-*.bin": "written answers",
}
MOST = 4  # folders that are named


def kept_in(out: Path) -> str | None:
    """What lies in the folder of a job, in its stages, families, cells or halves as well; None
    where there is nothing of it."""
    held = {folder: _parts(folder) for folder in _folders(out)}
    places = [f"{', '.join(parts)} in {folder}" for folder, parts in held.items() if parts]
    more = f"; and more in {counted(len(places) - MOST, 'folder')}" if len(places) > MOST else ""
    return f"kept: {'; '.join(places[:MOST])}{more}" if places else None


def continued(data: DataPart, steps: int, out: Path) -> str | None:
    """What the run in a folder has of a recipe's answers and of so many steps, and what is to come;
    None where there is no run."""
    saved = saved_steps(out / "checkpoints") if (out / "checkpoints").is_dir() else []
    try:
        there = json.loads((out / "data" / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    made, parts = saved[-1] if saved else 0, [f"{there['rows']:,} rows kept"]
    answered = there.get("answered")
    if data.regenerate and answered is not None:
        more = max(0, data.prompts - answered)
        parts.append(f"{answered:,} answers kept, at most {more:,} to write")
    shards = sum(1 for _ in out.glob("features/*/shard-*.json"))
    if data.features == "offline":
        parts.append(f"{counted(shards, 'shard')} of features kept, those of other rows to read")
    parts.append(f"{made:,} steps made, {max(0, steps - made):,} to come")
    return f"the run in {out}: {'; '.join(parts)}"


def _folders(out: Path) -> list[Path]:
    """The folder and the runs inside it."""
    if not out.is_dir():
        return []
    inside = sorted(path for path in out.iterdir() if (path / "run.lock").is_file())
    return [out, *inside]


def _parts(folder: Path) -> list[str]:
    """What one folder holds."""
    parts: list[str] = []
    for pattern, what in WRITTEN.items():
        if any(file.stat().st_size for file in folder.glob(pattern)):
            parts.append(what)
    if (folder / "data" / "manifest.json").is_file():
        parts.append("training rows")
    if (folder / "prune.json").is_file():
        parts.append("cut drafter")
    if steps := saved_steps(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []:
        parts.append(f"state after step {steps[-1]:,}")
    if (folder / "package" / "manifest.json").is_file():
        parts.append("package")
    return parts
