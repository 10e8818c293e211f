"""Flat Domino folders of SpecForge (architecture DominoDraftModel) and of ModelOpt (architecture
DFlashDraftModel with `projector_type: domino`), read as SGLang reads them.

Which token a row predicts, and which rows the head corrects, cannot be seen from the tensors: keys
that say so must be there. A DFlashDraftModel without its projector type is a DFlash to every
engine, so the tensors of the head are refused there by name (`flat_blocks`).
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
from specctl.export.imports.heads import ELSEWHERE, REPAIR, refused
from specctl.export.imports.published import Published
from specctl.export.readers.sglang_domino import DOMINO, REQUIRED, SglangDomino
from specctl.runtime.target.target import Target

SIZES = ("emb_dim", "gru_hidden_dim")


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return kind_of(config) == "domino"


def read(published: Published, target: Target) -> Imported:
    body = published.config
    nested = nested_of(body)
    for key, wanted in REQUIRED.items():
        if nested.get(key) != wanted or isinstance(nested[key], bool) != isinstance(wanted, bool):
            what = "config.json does not say that the head is one that we compute"
            raise refused(what, f"{key}: {nested.get(key)}", f"{key}: {wanted}", ELSEWHERE, key)
    for key in SIZES:
        if body.get(key, nested.get(key)) != nested.get(key):
            found = f"{key}: {body[key]}, and {nested.get(key)} in dflash_config"
            raise refused("config.json says two sizes", found, "one", REPAIR, key)
    settings = settings_of(body)
    layout = {"sample_from_anchor": (None, True), "shift_label": (True,)}
    refuse_variants(settings, projector_type=("domino",), **layout)
    rank, state, size = (number_of(settings, key) for key in (*SIZES, "block_size"))
    reading = reading_of(body, "domino", size, {"rank": rank, "state": state})
    return imported(published, target, reading, FlatRules(DOMINO, SglangDomino))


IMPORTER = Importer(
    "flat-domino",
    "architectures DominoDraftModel, DFlashDraftModel with projector_type domino",
    knows,
    read,
)
