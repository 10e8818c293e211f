"""Flat XPress folders (architectures Qwen3XPressModel, DFlashQwen3XPressModel), read as vLLM reads
them: the root's slot reads the root itself. Whoever trained the folder may have given it the token
before the root, as speculators does; nothing tells, so this is another reading of the folder, and
tau says which drafts further.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import drafter_of, refuse_variants
from specctl.export.imports.flat import (
    FlatRules,
    imported,
    kind_of,
    number_of,
    reading_of,
    settings_of,
)
from specctl.export.imports.heads import ELSEWHERE, refused
from specctl.export.imports.published import Published
from specctl.export.readers.vllm_xpress import ENGINE, XPRESS, VllmXPress
from specctl.runtime.target.target import Target

OTHER = "with the token before the root at its slot, as speculators trains"


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return kind_of(config) == "xpress"


def read(published: Published, target: Target) -> Imported:
    body = published.config
    settings = settings_of(body)
    refuse_variants(settings)
    rank, inner, size = (
        number_of(body, key) for key in ("xpress_rank", "xpress_mlp_hidden", "xpress_block_size")
    )
    if inner % rank:
        shown = f"xpress_mlp_hidden: {inner}, xpress_rank: {rank}"
        raise refused("the refiner's MLP is no multiple of its rank", shown, "one", ELSEWHERE)
    if settings.get("block_size", size) != size:
        shown = f"xpress_block_size: {size}, block_size: {settings['block_size']}"
        raise refused("config.json says two lengths of a block", shown, "one", ELSEWHERE)
    own = {"rank": rank, "mlp_ratio": inner // rank, "before_root": False}
    reading = reading_of(body, "xpress", size - 1, own)
    rules = FlatRules(XPRESS, VllmXPress, ENGINE, {"block_size": size})
    found = imported(published, target, reading, rules)
    other = drafter_of(
        replace(reading, own={**own, "before_root": True}), published.tensors, target
    )
    return replace(found, readings={OTHER: other})


IMPORTER = Importer(
    "flat-xpress", "architectures Qwen3XPressModel, DFlashQwen3XPressModel", knows, read
)
