"""OUT/run.yaml: what a run is, written once, so that `--recipe OUT` reads it back."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from specctl.core.storage.files import write_bytes
from specctl.recipes.schema import Recipe

RECORD = "run.yaml"
PACKAGES = ("specctl", "torch", "transformers", "accelerate", "safetensors")


def write_run_file(recipe: Recipe, out: Path, command: Sequence[str]) -> None:
    """The resolved recipe, the origin of every value, the command and the versions. A run that goes
    on unchanged keeps its own: where its values came from, and the command that began it."""
    path = out / RECORD
    if recorded(path) == recipe.to_json():
        return
    described = {
        "command": shlex.join(command),
        "versions": {name: _version(name) for name in PACKAGES},
        "recipe": recipe.to_json(),
        "origin": recipe.origin,
    }
    write_bytes(path, yaml.safe_dump(described, sort_keys=False).encode())


def recorded(path: Path) -> object:
    """The recipe in a run file; None without one that can be read."""
    try:
        return yaml.safe_load(path.read_text())["recipe"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
