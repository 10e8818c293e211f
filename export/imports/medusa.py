"""Medusa heads in FasterDecoding's layout: numbered names, own LM heads, no config of a model. Our
parameter names are the layout's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from specctl.drafters.medusa import Medusa, MedusaOptions
from specctl.export.formats.medusa import FILE, compare_heads
from specctl.export.imports import Imported, Importer
from specctl.export.imports.heads import REPAIR, check_names, count_of, dtype_of, refused
from specctl.export.imports.published import Published
from specctl.export.readers.medusa import TgiMedusa
from specctl.runtime.target.target import Target


def knows(config: Mapping[str, Any]) -> bool:
    return "medusa_num_heads" in config


def read(published: Published, target: Target) -> Imported:
    """As many heads and blocks as config.json says, no more and no fewer."""
    names = [path.name for path in published.files]
    if names != [FILE]:
        raise refused("Medusa's heads lie in one file", ", ".join(names), FILE, REPAIR)
    config = SimpleNamespace(**published.config)
    num_heads, num_blocks = (count_of(config, f"medusa_num_{of}") for of in ("heads", "layers"))
    options = MedusaOptions(num_heads=num_heads, num_blocks=num_blocks)
    with torch.device("meta"):  # shapes first, so that no size can ask for memory
        shell = Medusa(options, target.spec)
    check_names(published.tensors, shell.tensors())
    drafter = Medusa(options, target.spec)
    drafter.to(torch.device("cpu"), dtype_of(published.tensors))
    drafter.load_tensors(published.tensors)
    drafter.module.eval()
    return Imported(
        drafter,
        TgiMedusa.name,
        lambda source: compare_heads(source, TgiMedusa(published.folder)),
        num_heads,
    )


IMPORTER = Importer("medusa", "medusa_num_heads, FasterDecoding's heads", knows, read)
