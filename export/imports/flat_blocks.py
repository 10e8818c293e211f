"""Flat DFlash and DSpark folders of z-lab, DeepSpec, SpecForge and ModelOpt, read as SGLang reads
them: most settings inside `dflash_config` or, failing that, at the top; `target_layer_ids` count
layers. ModelOpt has DSpark's heads under names of its own.

A block of DFlash has one place more than it drafts, the root's, which does not speak; DSpark's root
does. Copies of the target's embedding and LM head (DeepSpec) are compared and left out.

JetSpec is a DFlash that says `causal_head`, or in NeMo `causal`; where no key says it, every reader
takes the block for DFlash's, whose slots see each other. NeMo's JetSpec said nothing at first: of
a folder of NeMo's (architecture Qwen3DFlashDraftModel) that says nothing, the causal block is
another reading, and tau says which drafts further.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

from specctl.export.imports import Imported, Importer
from specctl.export.imports.blocks import CAUSAL_KEYS, drafter_of, refuse_variants
from specctl.export.imports.flat import (
    FlatRules,
    imported,
    kind_of,
    number_of,
    reading_of,
    settings_of,
)
from specctl.export.imports.heads import REPAIR, refused
from specctl.export.imports.published import Published
from specctl.export.layouts.blocks import MARKOV
from specctl.export.readers.sglang_blocks import DFLASH, DSPARK, SglangBlocks
from specctl.runtime.target.target import Target

MIXTURES = "layer_fusion_weights"  # of DFly and DFlare
NEMO = "Qwen3DFlashDraftModel"
JETSPEC = "with a causal block, as NeMo's JetSpec before it wrote dflash_config.causal"
HEADS = {theirs: ours for ours, theirs in MARKOV.items()}
OF_SPARK = {
    "projector_type": (None, "dspark"),
    "markov_head_type": (None, *HEADS),
    "sample_from_anchor": (None, True),
    "shift_label": (None, True),
}
SPARK_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "sample_from_anchor",
)  # fmt: skip


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return kind_of(config) in ("dflash", "dspark")


def read(published: Published, target: Target) -> Imported:
    body = published.config
    family, settings = kind_of(body), settings_of(body)
    if MIXTURES in published.tensors:
        what = (
            "every layer has its own mixture of the target's depths, which engines would leave out"
        )
        wanted = "Qwen3DFlyModel, QwenDFlareDraftModel, or model_arch: dfly or dflare"
        raise refused(what, f"{MIXTURES} in a {body['architectures'][0]}", wanted, REPAIR)
    size = number_of(settings, "block_size", 2)
    if family == "dflash":
        refuse_variants(settings)
        reading = reading_of(body, "dflash", size - 1, {})
        plain = imported(published, target, reading, FlatRules(DFLASH, partial(_read, DFLASH)))
        if body["architectures"] != [NEMO] or any(
            settings.get(key) is not None for key in CAUSAL_KEYS
        ):
            return plain
        other = drafter_of(replace(reading, is_causal=True), published.tensors, target)
        return replace(plain, readings={JETSPEC: other})
    refuse_variants(settings, **OF_SPARK)
    for key in SPARK_KEYS:
        if body.get(key, settings.get(key)) != settings.get(key):
            both = f"{key}: {body[key]}, and {settings[key]} in dflash_config"
            raise refused("config.json says two things of the head", both, "one", REPAIR, key)
    kind = HEADS[settings.get("markov_head_type") or "vanilla"]
    own = {"rank": number_of(settings, "markov_rank"), "correction": kind}
    keys = {key: settings[key] for key in SPARK_KEYS if key in settings}
    rules = FlatRules(DSPARK, partial(_read, DSPARK), keys=keys)
    return imported(published, target, reading_of(body, "dspark", size, own), rules)


def _read(architecture: str, folder: Any, *target: Any) -> SglangBlocks:
    return SglangBlocks(folder, architecture, *target)


IMPORTER = Importer(
    "flat-blocks",
    "architectures DFlashDraftModel, Qwen3DFlashDraftModel, Qwen3DSparkModel",
    knows,
    read,
)
