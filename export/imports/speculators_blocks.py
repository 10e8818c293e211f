"""DFlash, DFlash2 and DSpark in the speculators format, read as vLLM reads them: layer ids count
hidden states, the first proposal method says how many tokens are drafted, a missing
`sample_from_anchor` is false. An embedding in the folder may differ from the target's in the row of
the mask alone. DSpark's gated and rnn heads, which vLLM does not have, are read as speculators
computes them.

speculators 0.9 writes `sliding_window_non_causal: false` by default, and its trainer
looks at it in layers with a window alone; vLLM takes every layer for causal then. Such blocks are
read as they were trained, and the import says so. Layers with a window must say it.
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import BlockReading, drafter_of, refuse_variants, window_of
from specctl.export.imports.flat_blocks import HEADS, OF_SPARK
from specctl.export.imports.heads import ELSEWHERE, refused
from specctl.export.imports.layers import SLIDING
from specctl.export.imports.published import Published
from specctl.export.imports.speculators import BLOCKS, KIND, other_verifier
from specctl.export.layouts.blocks import check_confidence
from specctl.export.readers import speculators_blocks
from specctl.export.readers.block_heads import VANILLA
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
)
from specctl.export.readers.vllm_blocks import ENGINE, OF_DFLASH2, VllmBlocks, block_config
from specctl.runtime.target.target import Target

CAUSAL = (
    "sliding_window_non_causal is false: vLLM drafts with causal blocks, which speculators did not "
    "train; read as trained. For vLLM, set it to true or export the package"
)
OTHER_HEADS = (
    "vLLM 0.33 has DSpark's plain head only; SGLang has this one: export the package with "
    "--to sglang"
)
WINDOWS = (
    "windows are read as vLLM reads them, by the place of each slot; speculators trains all slots "
    "of a block with the window of its first"
)
OF_SELECTOR = ("conv_taps", "conv_group", "rank", "candidates")  # our options, in their order


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get(KIND) in BLOCKS


def read(published: Published, target: Target) -> Imported:
    body = published.config
    derived = block_config(body)
    notes, family = other_verifier(body, target), derived["kind"]
    slides = SLIDING in (derived.get("layer_types") or ())
    causal = derived.get("is_causal") is True  # which speculators does not write, and vLLM obeys
    if slides and not causal:
        causal = body.get("sliding_window_non_causal") is False
    elif not causal and derived.get("dflash_config", {}).get("causal"):
        derived["dflash_config"]["causal"] = False
        notes += (CAUSAL,)
    is_spark, speaks = family == "dspark", bool(derived["sample_from_anchor"])
    if is_spark and not speaks:
        found = "sample_from_anchor: false, or missing"
        raise refused("the root of our DSpark block speaks", found, "true", ELSEWHERE)
    refuse_variants(derived, **(OF_SPARK if is_spark else {}))
    config, length = qwen3_layers(derived), derived["length"]
    said = {"causal": body.get("sliding_window_non_causal", derived.get("is_causal"))}
    reading = BlockReading(
        config,
        derived["eagle_aux_hidden_state_layer_ids"],
        body["mask_token_id"],
        length,
        family,
        own_options(derived),
        causal,
        window_of(config, said),
    )
    drafter = drafter_of(reading, published.tensors, target)
    is_vllms = derived.get("markov_head_type", VANILLA) == VANILLA
    engine = ENGINE if is_vllms else speculators_blocks.ENGINE

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, length - 1, without=body["mask_token_id"])
        reader = VllmBlocks if is_vllms else speculators_blocks.SpeculatorsSpark
        theirs = reader(published.folder, embedding_of(source), head_of(source), derived)
        ours_NV = drafted_logits(twin(source, drafter), trial)
        compare(engine, theirs.drafted_logits(trial), ours_NV)
        if is_spark:
            check_confidence(source, theirs.confidences(trial), trial)

    trained = body.get("block_size")
    if isinstance(trained, int) and trained - (not speaks) != length:
        notes += (f"trained with blocks of {trained}, meant to draft {length}: read as vLLM does",)
    notes += (() if is_vllms else (OTHER_HEADS,)) + ((WINDOWS,) if slides else ())
    return Imported(drafter, engine, prove, length, notes)


def own_options(derived: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the correction."""
    if derived["kind"] == "dspark":
        head = derived.get("markov_head_type", VANILLA)
        return {"rank": derived.get("markov_rank"), "correction": HEADS[head]}
    if derived["kind"] == "dflash2":
        sizes = (derived["dflash_config"][key] for key in OF_DFLASH2)
        return dict(zip(OF_SELECTOR, sizes, strict=True))
    return {}


def qwen3_layers(derived: dict[str, Any]) -> SimpleNamespace:
    """What the importers check of the layers, with the defaults of vLLM."""
    if derived.get("model_type") != "qwen3":
        found = f"model_type: {derived.get('model_type')}"
        raise refused("of blocks plain Qwen3 layers are imported", found, "qwen3", ELSEWHERE)
    derived.setdefault("head_dim", derived["hidden_size"] // derived["num_attention_heads"])
    rope = {"rope_theta": 1_000_000.0, **(derived.get("rope_parameters") or {})}  # as vLLM
    return SimpleNamespace(**{**derived, "rope_parameters": rope})


IMPORTER = Importer(
    "speculators-blocks", "speculators_model_type dflash, dflash2, dspark", knows, read
)
