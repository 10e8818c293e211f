"""DFlash and DSpark in the speculators format, read as vLLM reads them: layer ids count hidden
states, the first proposal method says how many tokens are drafted, a missing `sample_from_anchor`
is false. An embedding in the folder may differ from the target's in the row of the mask alone.

speculators 0.9 writes `sliding_window_non_causal: false` by default, and its trainer
looks at it in layers with a window alone; vLLM takes every layer for causal then. Such blocks are
read as they were trained, and the import says so.
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import BlockReading, drafter_of, refuse_variants
from specctl.export.imports.heads import ELSEWHERE, refused
from specctl.export.imports.published import Published
from specctl.export.imports.speculators import BLOCKS, KIND, other_verifier
from specctl.export.layouts.blocks import check_confidence
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
)
from specctl.export.readers.vllm_blocks import ENGINE, VllmBlocks, block_config
from specctl.runtime.target.target import Target

CAUSAL = (
    "sliding_window_non_causal is false: vLLM drafts with causal blocks, which speculators did not "
    "train; read as trained. For vLLM, set it to true or export the package"
)


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get(KIND) in BLOCKS


def read(published: Published, target: Target) -> Imported:
    body = published.config
    derived = block_config(body)
    notes = other_verifier(body, target)
    causal = derived.get("is_causal") is True  # which speculators does not write, and vLLM obeys
    if not causal and derived.get("dflash_config", {}).get("causal"):
        derived["dflash_config"]["causal"] = False
        notes += (CAUSAL,)
    refuse_variants(derived)
    is_spark, speaks = derived["kind"] == "dspark", bool(derived["sample_from_anchor"])
    if is_spark and not speaks:
        found = "sample_from_anchor: false, or missing"
        raise refused("the root of our DSpark block speaks", found, "true", ELSEWHERE)
    if derived.get("model_type") != "qwen3":
        found = f"model_type: {derived.get('model_type')}"
        raise refused("of blocks plain Qwen3 layers are imported", found, "qwen3", ELSEWHERE)
    derived.setdefault("head_dim", derived["hidden_size"] // derived["num_attention_heads"])
    rope = {"rope_theta": 1_000_000.0, **(derived.get("rope_parameters") or {})}  # as vLLM
    config, length = SimpleNamespace(**{**derived, "rope_parameters": rope}), derived["length"]
    reading = BlockReading(
        config,
        derived["eagle_aux_hidden_state_layer_ids"],
        body["mask_token_id"],
        length,
        derived.get("markov_rank") if is_spark else None,
        causal,
    )
    drafter = drafter_of(reading, published.tensors, target)

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, length - 1, without=body["mask_token_id"])
        theirs = VllmBlocks(published.folder, embedding_of(source), head_of(source), derived)
        ours_NV = drafted_logits(twin(source, drafter), trial)
        compare(ENGINE, theirs.drafted_logits(trial), ours_NV)
        if is_spark:
            check_confidence(source, theirs.confidences(trial), trial)

    trained = body.get("block_size")
    if isinstance(trained, int) and trained - (not speaks) != length:
        notes += (f"trained with blocks of {trained}, meant to draft {length}: read as vLLM does",)
    return Imported(drafter, ENGINE, prove, length, notes)


IMPORTER = Importer("speculators-blocks", "speculators_model_type dflash, dspark", knows, read)
