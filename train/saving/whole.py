"""Whether a checkpoint folder is whole: its manifest, its sizes, its hashes. No torch.

manifest.json is written last and in one spelling only, and carries a hash of itself, so that any
changed byte of any file of the folder is seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.train.saving.disk import file_entry

SCHEMA = "specctl.checkpoint/1"
MANIFEST = "manifest.json"


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
