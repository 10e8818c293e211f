"""Whether a checkpoint folder is whole: its manifest, its sizes, its hashes. No torch.

manifest.json is written last and in one spelling only, and carries a hash of itself, so that any
changed byte of any file of the folder is seen.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specctl.core.storage.files import file_entry

SCHEMA = "specctl.checkpoint/1"
MANIFEST = "manifest.json"
_FILE = re.compile(r"(manifest|state)\.json|(model|optimizer|text|rng-\d{3,})\.safetensors")
_HALF = re.compile(r"\.tmp-(latest|step\d{6,})")  # being written: nothing in it is a user's
_GOING = re.compile(r"\.tmp-(old|clean)-(?P<name>.+)")
_DAMAGED = re.compile(r"damaged-step\d{6,}(-\d+)?")


def step_name(step: int) -> str:
    return f"step{step:06d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a folder in `folder`, ascending; says nothing about its health."""
    names = [p.name for p in folder.glob("step*")]
    return sorted(int(n[4:]) for n in names if n[4:].isdigit() and step_name(int(n[4:])) == n)


def canonical(value: Mapping[str, Any]) -> bytes:
    """The one spelling of a JSON object, so that a changed byte is a changed file."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def digest(manifest: Mapping[str, Any]) -> str:
    """The hash that a manifest carries of its other fields."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; ValueError says what is wrong with it."""
    raw = (folder / MANIFEST).read_bytes()
    manifest = json.loads(raw)
    if not isinstance(manifest, dict) or canonical(manifest) != raw:
        raise ValueError("manifest is not in its canonical spelling")
    own = manifest.pop("sha256", None)
    if digest(manifest) != own:
        raise ValueError("manifest does not match its own hash")
    if manifest["schema"] != SCHEMA:
        raise ValueError(f"schema {manifest['schema']}, this version reads {SCHEMA}")
    return manifest


def damage(folder: Path, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint, None if it is whole. Without `hashes`, sizes only."""
    try:
        manifest = read_manifest(folder)
        if step_name(manifest["step"]) != folder.name:
            return f"manifest is of step {manifest['step']}"
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
            if hashes and file_entry(folder / name).sha256 != entry["sha256"]:
                return f"{name} does not match its hash"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be read: {error}"
    return None


def progress(folder: Path) -> dict[str, Any]:
    """Where the run stood at a whole checkpoint: step, best step, what was measured there."""
    found: dict[str, Any] = json.loads((folder / "state.json").read_bytes())["progress"]
    return found


def left_over(folder: Path) -> list[Path]:
    """What killed processes left in the folder of checkpoints, by the names that a run gives."""
    paths = sorted(folder.glob(".tmp-*"))
    return [path for path in paths if _HALF.fullmatch(path.name) or _GOING.fullmatch(path.name)]


def set_aside(folder: Path) -> list[Path]:
    """Checkpoints that were moved aside as damaged."""
    return [path for path in sorted(folder.glob("damaged-*")) if _DAMAGED.fullmatch(path.name)]


def put_aside(checkpoint: Path) -> None:
    """Move a damaged checkpoint aside, beside earlier ones of the same step."""
    checkpoint.rename(free_name(checkpoint.with_name(f"damaged-{checkpoint.name}")))


def free_name(path: Path) -> Path:
    """The path, or with the first number behind it that nothing has."""
    number, free = 1, path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def drop(path: Path) -> Path | None:
    """Delete a checkpoint, or what a killed process left of one: the files that a run writes and
    nothing else. Where more lay in it that is kept, in the folder that is returned.

    The caller has given it a name that is no checkpoint's. What cannot be deleted is left.
    """
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        elif _HALF.fullmatch(path.name):
            shutil.rmtree(path)
        elif path.is_dir():
            return _drop_files(path)
    return None


def _drop_files(folder: Path) -> Path | None:
    names = _own_names(folder)
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        if (folder / name).is_file() and not (folder / name).is_symlink():
            (folder / name).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
        return None
    going = _GOING.fullmatch(folder.name)
    return folder.rename(
        free_name(folder.with_name(f"kept-{going['name'] if going else folder.name}"))
    )


def _own_names(folder: Path) -> set[str]:
    """Names of a checkpoint's files: what its manifest lists, and what every run writes."""
    names = {path.name for path in folder.iterdir() if _FILE.fullmatch(path.name)}
    with suppress(OSError, ValueError, KeyError, TypeError):
        names |= {name for name in read_manifest(folder)["files"] if Path(name).name == name}
    return names
