"""Medusa heads in FasterDecoding's layout: numbered names, own LM heads, no config of a model. Our
parameter names are the layout's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

from specctl.drafters.heads.medusa import Medusa, MedusaOptions
from specctl.export.formats.medusa import FILE, compare_heads
from specctl.export.imports import Imported, Importer
from specctl.export.imports.heads import count_of, filled, refused
from specctl.export.imports.published import Published
from specctl.export.readers.medusa import TgiMedusa
from specctl.runtime.target.target import Target


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return "medusa_num_heads" in config


def read(published: Published, target: Target) -> Imported:
    """As many heads and blocks as config.json says, no more and no fewer."""
    names = [path.name for path in published.files]
    if names != [FILE]:
        do = f"leave {FILE} alone of the safetensors in the folder, beside config.json"
        raise refused("Medusa's heads lie in one file", ", ".join(names), FILE, do)
    config = SimpleNamespace(**published.config)
    num_heads, num_blocks = (count_of(config, f"medusa_num_{of}") for of in ("heads", "layers"))
    options = MedusaOptions(num_heads=num_heads, num_blocks=num_blocks)
    drafter = filled(lambda: Medusa(options, target.spec), published.tensors)
    return Imported(
        drafter,
        TgiMedusa.name,
        lambda source: compare_heads(source, TgiMedusa(published.folder)),
        num_heads,
    )


IMPORTER = Importer("medusa", "medusa_num_heads, FasterDecoding's heads", knows, read)
