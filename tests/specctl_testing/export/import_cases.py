"""What the tests of import share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specctl.core.drafter import Drafter
from specctl.export.imports import Report, import_published
from specctl.runtime.target.target import Target

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
COMMAND = ["specctl", "import"]
LAYERS = "eagle_aux_hidden_state_layer_ids"


def same_tensors(ours: Drafter, theirs: Drafter) -> bool:
    ours_T, theirs_T = ours.tensors(), theirs.tensors()
    return ours_T.keys() == theirs_T.keys() and all(
        torch.equal(ours_T[name], theirs_T[name]) for name in ours_T
    )


def taken(folder: Path, target: Target, out: Path) -> Report:
    return import_published(folder, target, out, command=COMMAND)
