"""Which model folders hold a model that writes pictures in an order of its own: no causal language
model, so that transformers does not read it. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specctl.core.storage.bounded_read import read_text

NEIGHBOURS, ANY_ORDER = "neighbours", "any-order"
GRID_KINDS = (NEIGHBOURS, ANY_ORDER)


def grid_kind(config: Mapping[str, Any]) -> str | None:
    """The kind that a config.json or a recipe's `model` names; None for any other model."""
    kind = str(config.get("model_type", ""))
    return kind if kind in GRID_KINDS else None


def is_grid_folder(folder: Path) -> bool:
    """Whether a folder's config.json names such a model; False where none can be read."""
    try:
        config = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and grid_kind(config) is not None
