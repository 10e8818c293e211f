"""Which model folders hold a masked diffusion language model. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.core.storage.bounded_read import read_text

LLADA, DREAM = "llada", "dream"
KINDS = (LLADA, DREAM)


def diffusion_kind(config: Mapping[str, Any]) -> str | None:
    """The layout that a config.json names (Dream's says "Dream"); None for any other model."""
    kind = str(config.get("model_type", "")).lower()
    return kind if kind in KINDS else None


def is_diffusion_folder(folder: Path) -> bool:
    """Whether a folder's config.json names a masked diffusion model; False where none can be read,
    which whoever loads the folder explains."""
    try:
        config = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and diffusion_kind(config) is not None
