"""The models that Ollama pulled to this machine: `ollama:NAME:TAG` is the GGUF file that a manifest
names. No torch.

manifests/REGISTRY/OWNER/NAME/TAG is JSON with a list of layers; the one of the weights names its
file below blobs/ by its digest. The other layers (a template, parameters) are Ollama's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, nearest

PREFIX, LATEST = "ollama:", "latest"
WEIGHTS_LAYER = "application/vnd.ollama.image.model"
LONGEST_MANIFEST = 1 << 20  # bytes
_DIGEST = re.compile(r"sha256:[0-9a-f]{1,64}")


def pulled() -> Iterator[tuple[str, Path]]:
    """Name and file of every model; the file may be gone."""
    for home in _homes():
        manifests = home / "manifests"
        for path in sorted(manifests.rglob("*")) if manifests.is_dir() else ():
            digest = _weights(path) if path.is_file() else None
            steps = path.relative_to(manifests).parts
            if digest is not None and len(steps) >= 3:
                *_, owner, model, tag = steps
                name = model if owner == "library" else f"{owner}/{model}"
                yield f"{PREFIX}{name}:{tag}", home / "blobs" / digest.replace(":", "-")


def file_of(name: str) -> Path:
    """The GGUF file of `ollama:NAME` or `ollama:NAME:TAG`; without a tag the latest. FileError for
    a model that is not here."""
    words = name.removeprefix(PREFIX)
    wanted = f"{PREFIX}{words}" + ("" if ":" in words else f":{LATEST}")
    known: dict[str, Path] = {}
    for each, path in pulled():
        known.setdefault(each, path)
    file = known.get(wanted)
    if file is not None and file.is_file():
        return file
    there = "it is listed, but its file is gone" if file is not None else "no model of that name"
    near = f"; here are: {nearest(wanted, known)}" if known and file is None else ""
    raise FileError(
        f"Ollama has not pulled {ascii(words)[1:-1][:100]} to this machine",
        found=there,
        expected=f"{PREFIX}NAME:TAG, as specctl targets lists them",
        do=f"ollama pull {words}{near}",
        where=", ".join(str(home) for home in _homes()),
    )


def _homes() -> list[Path]:
    named = [os.environ.get("OLLAMA_MODELS"), "~/.ollama/models"]
    named.append("/usr/share/ollama/.ollama/models")
    return list(dict.fromkeys(Path(one).expanduser() for one in named if one))


def _weights(manifest: Path) -> str | None:
    """The digest of the weights that a manifest names; None where it names none."""
    layers = _json(manifest).get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == WEIGHTS_LAYER:
            digest = str(layer.get("digest", ""))
            return digest if _DIGEST.fullmatch(digest) else None
    return None


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LONGEST_MANIFEST:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
