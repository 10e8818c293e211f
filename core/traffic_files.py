"""The files of kept traffic: numbered segments of JSON lines in one folder, the newest last.

Read while a server writes and evicts them: a segment that is gone by then is older than what was
wanted, and a line without its end is one that a killed server did not finish. No torch.
"""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"traffic-([0-9]{8})\.jsonl")


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"traffic-{number:08}.jsonl"


def segments(folder: Path) -> list[Path]:
    """The segments of a folder, the oldest first; links and other files are none."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def next_number(folder: Path) -> int:
    """Of the segment that is to be begun."""
    found = segments(folder)
    return 1 + (int(found[-1].name.removeprefix("traffic-")[:8]) if found else 0)


def newest_lines(folder: Path, count: int) -> list[bytes]:
    """The newest lines of the folder, at most `count`, in the order in which they were written."""
    found: list[bytes] = []
    for path in reversed(segments(folder)):
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:  # evicted meanwhile
            break
        found = [line for line in lines if line.endswith(b"\n")] + found
        if len(found) >= count:
            break
    return found[-count:]
