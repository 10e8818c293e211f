"""Flat DFlash2 folders of z-lab (architecture DFlash2DraftModel and its other names) and of
ModelOpt (DFlashDraftModel with `projector_type: dflash2`), read as SGLang reads them. vLLM reads
them alike.

Engines look for the sizes of convolutions and selector inside `dflash_config` alone, and build a
draft model without the part where one is missing: all of them must be there. A DFlashDraftModel
without its projector type is a DFlash to every engine, so the tensors of the head are refused there
by name (`flat_blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import refuse_variants
from specctl.export.imports.flat import (
    FlatRules,
    imported,
    kind_of,
    nested_of,
    number_of,
    reading_of,
    settings_of,
)
from specctl.export.imports.published import Published
from specctl.export.readers.sglang_selector import DFLASH2, SglangSelector
from specctl.runtime.target.target import Target

SIZES = {  # our options -> their keys
    "conv_taps": "conv_kernel_size",
    "conv_group": "conv_group_size",
    "rank": "selector_rank",
    "candidates": "selector_top_k",
}


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return kind_of(config) == "dflash2"


def read(published: Published, target: Target) -> Imported:
    body = published.config
    nested, settings = nested_of(body), settings_of(body)
    refuse_variants(settings, projector_type=(None, "dflash2"))
    own = {option: number_of(nested, key) for option, key in SIZES.items()}
    size = number_of(settings, "block_size", 2)
    reading = reading_of(body, "dflash2", size - 1, own)
    return imported(published, target, reading, FlatRules(DFLASH2, SglangSelector))


IMPORTER = Importer(
    "flat-dflash2",
    "architectures DFlash2DraftModel, DFlashDraftModel with projector_type dflash2",
    knows,
    read,
)
