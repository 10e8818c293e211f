"""Flat DFlash and DSpark folders of z-lab, DeepSpec and SpecForge, read as SGLang reads them: most
settings inside `dflash_config` or, failing that, at the top; `target_layer_ids` count layers.

A block of DFlash has one place more than it drafts, the root's, which does not speak; DSpark's root
does. Copies of the target's embedding and LM head (DeepSpec) are compared and left out.
Letters: D hidden width, N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import (
    EMBEDDING,
    HEAD,
    TABLES,
    BlockReading,
    drafter_of,
    is_causal,
    not_in_sglang,
    refuse_variants,
)
from specctl.export.imports.flat_domino import is_domino
from specctl.export.imports.heads import ELSEWHERE, REPAIR, refused
from specctl.export.imports.layers import derived_config
from specctl.export.imports.published import Published
from specctl.export.layouts.blocks import check_confidence
from specctl.export.layouts.engines import taps_of_layer_ids
from specctl.export.readers.sglang_blocks import DFLASH, DSPARK, ENGINE, SglangBlocks
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
)
from specctl.runtime.target.target import Target

NAMES = (DFLASH, DSPARK, "DSparkDraftModel")
SPARK_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "sample_from_anchor",
)  # fmt: skip


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    named = config.get("architectures")
    is_flat = not {"speculators_config", "speculators_model_type"} & config.keys()
    if is_domino(config):
        return False
    return is_flat and isinstance(named, list) and len(named) == 1 and named[0] in NAMES


def read(published: Published, target: Target) -> Imported:
    body = published.config
    settings = _settings(body)
    config = derived_config(body, "qwen3")
    is_spark = body["architectures"] != [DFLASH] or settings.get("projector_type") == "dspark"
    refuse_variants(settings)
    if is_spark and settings.get("sample_from_anchor", True) is not True:
        found = f"sample_from_anchor: {settings['sample_from_anchor']}"
        raise refused("the root of our DSpark block speaks", found, "true", ELSEWHERE)
    size = _number(settings, "block_size", 2)
    ids = settings.get("target_layer_ids")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        what = "config.json does not say which layers the head reads"
        raise refused(what, f"target_layer_ids: {ids}", "a list of layers", REPAIR)
    rank = _number(settings, "markov_rank", 1) if is_spark else None
    reading = BlockReading(
        config,
        taps_of_layer_ids(ids),
        settings.get("mask_token_id"),
        size if is_spark else size - 1,
        rank,
        is_causal(settings),
    )
    drafter = drafter_of(reading, published.tensors, target)
    beside = {n: t for n, t in published.tensors.items() if n not in (*TABLES, EMBEDDING, HEAD)}
    if drafter.options.mask_id is None or drafter.vocab is not None:
        found = "an embedding or a vocabulary of its own"
        what = "engines take embedding and LM head of a flat block from the target"
        raise refused(what, found, "the target's", ELSEWHERE)
    kind = DSPARK if is_spark else DFLASH
    staged: dict[str, Any] = {"architectures": [kind], "model_type": "qwen3"}
    staged |= {key: settings[key] for key in SPARK_KEYS if is_spark and key in settings}
    notes: tuple[str, ...] = ()
    if reading.is_causal:
        staged["is_causal"] = True
        notes = not_in_sglang(body)

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, reading.num_drafted - 1, without=drafter.options.mask_id)
        embedding_VD, head_VD = embedding_of(source), head_of(source)
        with published.staged(beside, **staged) as folder:
            layers = target.spec.num_layers
            theirs = SglangBlocks(folder, kind, embedding_VD, head_VD, layers)
            theirs_NV, sure_N = theirs.drafted_logits(trial), None
            if is_spark:
                sure_N = theirs.confidences(trial)
        compare(ENGINE, theirs_NV, drafted_logits(twin(source, drafter), trial))
        if is_spark:
            check_confidence(source, sure_N, trial)

    return Imported(drafter, ENGINE, prove, reading.num_drafted, notes)


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    nested = body.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise refused("dflash_config is no object", str(nested), "keys and values", REPAIR)
    return {**body, **nested}


def _number(settings: Mapping[str, Any], key: str, least: int) -> int:
    found = settings.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= 1 << 16:
        what = "config.json does not say a size of the head"
        raise refused(what, f"{key}: {found}", f"{least} or more", REPAIR, f"config.json:{key}")
    return found


IMPORTER = Importer("flat-blocks", "architectures DFlashDraftModel, Qwen3DSparkModel", knows, read)
