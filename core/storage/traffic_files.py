"""The files of kept traffic: numbered segments of JSON lines in one folder, the newest last.

Read while a server writes and evicts them: a segment that is gone by then is older than what was
wanted, and a line without its end is one that a killed server did not finish. Beside them stands
which target wrote the answers. No torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from specctl.core.storage.files import write_json

_NAME = re.compile(r"traffic-([0-9]{8})\.jsonl")
_WRITER = ".target.json"  # hidden: whoever reads the folder as data skips it


@dataclass(frozen=True, slots=True)
class Writer:
    """The target that wrote the answers: its name, and the fingerprints of its weights and of its
    tokenizer."""

    name: str
    fingerprint: str
    tokenizer: str | None = None


def writer_of(folder: Path) -> Writer | None:
    """None where a server of before did not say it, or where it cannot be read."""
    try:
        found = json.loads((folder / _WRITER).read_text(encoding="utf-8"))
        tokenizer = found.get("tokenizer")
        known = None if tokenizer is None else str(tokenizer)
        return Writer(str(found["name"]), str(found["fingerprint"]), known)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def note_writer(folder: Path, writer: Writer) -> None:
    write_json(folder / _WRITER, asdict(writer))
    (folder / _WRITER).chmod(0o600)


def has_records(folder: Path) -> bool:
    return any(path.stat().st_size for path in segments(folder))


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
            continue
        found = [line for line in lines if line.endswith(b"\n")] + found
        if len(found) >= count:
            break
    return found[-count:]
