"""What the tests of import share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.drafter import Drafter
from specctl.core.errors import GateError
from specctl.export.imports import Imported, Report, import_published
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


def stopped(folder: Path, target: Target, out: Path) -> Imported:
    """What an import read, ended before anything is measured or written."""
    seen: list[Imported] = []

    def stop(found: Imported, serve: Any) -> Any:
        seen.append(found)
        raise GateError("read", found="it", expected="it", do="go on")

    with pytest.raises(GateError, match="read"):
        import_published(folder, target, out, command=["x"], measure=stop)
    (found,) = seen
    return found
