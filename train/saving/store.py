"""Files that are whole or absent: written beside their place, flushed, then renamed; hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from specctl.train.saving.disk import Disk, write_whole


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(fields: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of the fields."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_bytes(path: Path, body: bytes) -> None:
    """Atomic on POSIX: a reader sees the old file, no file, or the whole new one."""
    write_whole(Disk(), path, body)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(fields, indent=2, ensure_ascii=True) + "\n").encode())


def write_arrays(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str]
) -> str:
    """Write a safetensors file; returns its sha256."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    body = save(whole, metadata=dict(notes))
    write_bytes(path, body)
    return hashlib.sha256(body).hexdigest()
