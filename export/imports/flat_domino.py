"""Flat Domino folders of SpecForge (architecture DominoDraftModel) and of ModelOpt (architecture
DFlashDraftModel with `projector_type: domino`), read as SGLang reads them.

Which token a row predicts, and which rows the head corrects, cannot be seen from the tensors: keys
that say so must be there. A DFlashDraftModel without its projector type is a DFlash to every
engine, so the tensors of the head are refused there by name (`flat_blocks`).
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import BlockReading, drafter_of, is_causal, refuse_variants
from specctl.export.imports.flat import (
    causal_key,
    causal_notes,
    check_lent,
    number_of,
    own_tensors,
    taps_of,
)
from specctl.export.imports.heads import ELSEWHERE, REPAIR, refused
from specctl.export.imports.layers import derived_config
from specctl.export.imports.published import Published
from specctl.export.readers.sglang_blocks import DFLASH, ENGINE
from specctl.export.readers.sglang_domino import DOMINO, REQUIRED, SglangDomino
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin
from specctl.runtime.target.target import Target

SIZES = ("emb_dim", "gru_hidden_dim")


def is_domino(config: Mapping[str, Any]) -> bool:
    nested = config.get("dflash_config")
    kind = nested.get("projector_type") if isinstance(nested, Mapping) else None
    return config.get("architectures") in ([DOMINO], [DFLASH]) and (
        config["architectures"] == [DOMINO] or kind == "domino"
    )


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return is_domino(config)


def read(published: Published, target: Target) -> Imported:
    body = published.config
    nested = body.get("dflash_config")
    if not isinstance(nested, Mapping):
        raise refused("dflash_config is no object", str(nested), "keys and values", REPAIR)
    for key, wanted in REQUIRED.items():
        if nested.get(key) != wanted or isinstance(nested[key], bool) != isinstance(wanted, bool):
            what = "config.json does not say that the head is one that we compute"
            raise refused(what, f"{key}: {nested.get(key)}", f"{key}: {wanted}", ELSEWHERE, key)
    for key in SIZES:
        if body.get(key, nested.get(key)) != nested.get(key):
            found = f"{key}: {body[key]}, and {nested.get(key)} in dflash_config"
            raise refused("config.json says two sizes", found, "one", REPAIR, key)
    settings = {**body, **nested}
    refuse_variants({**settings, "projector_type": None})
    rank, state, size = (number_of(settings, key) for key in (*SIZES, "block_size"))
    taps, mask_id = taps_of(settings), settings.get("mask_token_id")
    config = derived_config(body, "qwen3")
    reading = BlockReading(config, taps, mask_id, size, rank, is_causal(settings), state)
    drafter = drafter_of(reading, published.tensors, target)
    check_lent(drafter)
    beside = own_tensors(published.tensors)
    staged = {"architectures": [DOMINO], "model_type": "qwen3", **causal_key(reading)}

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, size - 1, without=drafter.options.mask_id)
        with published.staged(beside, **staged) as folder:
            layers = target.spec.num_layers
            theirs = SglangDomino(folder, embedding_of(source), head_of(source), layers)
            theirs_NV = theirs.drafted_logits(trial)
        compare(ENGINE, theirs_NV, drafted_logits(twin(source, drafter), trial))

    return Imported(drafter, ENGINE, prove, size, causal_notes(reading, body))


IMPORTER = Importer(
    "flat-domino",
    "architectures DominoDraftModel, DFlashDraftModel with projector_type domino",
    knows,
    read,
)
