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
from specctl.export.imports.blocks import BlockReading, drafter_of, is_causal, refuse_variants
from specctl.export.imports.flat import (
    causal_key,
    causal_notes,
    check_lent,
    number_of,
    own_tensors,
    taps_of,
)
from specctl.export.imports.flat_domino import is_domino
from specctl.export.imports.heads import ELSEWHERE, REPAIR, refused
from specctl.export.imports.layers import derived_config
from specctl.export.imports.published import Published
from specctl.export.layouts.blocks import check_confidence
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
    size = number_of(settings, "block_size", 2)
    rank = number_of(settings, "markov_rank") if is_spark else None
    reading = BlockReading(
        config,
        taps_of(settings),
        settings.get("mask_token_id"),
        size if is_spark else size - 1,
        rank,
        is_causal(settings),
    )
    drafter = drafter_of(reading, published.tensors, target)
    check_lent(drafter)
    beside = own_tensors(published.tensors)
    kind = DSPARK if is_spark else DFLASH
    staged = {"architectures": [kind], "model_type": "qwen3", **causal_key(reading)}
    staged |= {key: settings[key] for key in SPARK_KEYS if is_spark and key in settings}

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

    return Imported(drafter, ENGINE, prove, reading.num_drafted, causal_notes(reading, body))


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    nested = body.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise refused("dflash_config is no object", str(nested), "keys and values", REPAIR)
    return {**body, **nested}


IMPORTER = Importer("flat-blocks", "architectures DFlashDraftModel, Qwen3DSparkModel", knows, read)
