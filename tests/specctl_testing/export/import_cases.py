"""What the tests of import share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specctl.export.imports import Report, import_published
from specctl.runtime.target.target import Target

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
COMMAND = ["specctl", "import"]
LAYERS = "eagle_aux_hidden_state_layer_ids"


def taken(folder: Path, target: Target, out: Path) -> Report:
    return import_published(folder, target, out, command=COMMAND)
