"""What flat folders of blocks share, whatever corrects the block: which family they are, their
settings, how a block says to SGLang what its slots see, and the proof.
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from specctl.drafters.blocks.dflash import InjectedBlocks
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported
from specctl.export.imports.blocks import (
    EMBEDDING,
    HEAD,
    TABLES,
    BlockReading,
    drafter_of,
    is_causal,
    window_of,
)
from specctl.export.imports.heads import ELSEWHERE, REPAIR, refused
from specctl.export.imports.layers import derived_config
from specctl.export.imports.published import Published
from specctl.export.layouts.block_names import own_tensors, published_name
from specctl.export.layouts.blocks import check_confidence
from specctl.export.layouts.engines import taps_of_layer_ids
from specctl.export.readers.sglang_blocks import ENGINE
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
)
from specctl.runtime.target.target import Target

DFLASH = "DFlashDraftModel"
# Which family an architecture is; ModelOpt has one name for all, beside the projector's type.
ARCHITECTURES = {
    "DFlash2DraftModel": "dflash2",
    "DFlash2BeamDraftModel": "dflash2",
    "MiniMaxDFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DominoDraftModel": "domino",
    "LiLiCorrDraftModel": "lilicorr",
    "Qwen3DFlashDraftModel": "dflash",
    "Qwen3DFlyModel": "dfly",
    "QwenDFlareDraftModel": "dflare",
    "Qwen3XPressModel": "xpress",
    "DFlashQwen3XPressModel": "xpress",
}
LAYERED = (
    "dflare",
    "dfly",
)  # named by `model_arch`, too, beside an architecture of DFlash or DSpark
PROJECTORS = ("dflash2", "domino", "dspark", "lilicorr")  # of DFlashDraftModel; xpress has none


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The family of a flat folder of blocks, by its architecture, `model_arch` and
    `projector_type`; None for any other configuration. A DFlashDraftModel that says neither is a
    DFlash to every engine."""
    named = config.get("architectures")
    if {"speculators_config", "speculators_model_type"} & config.keys():
        return None
    if not isinstance(named, list) or len(named) != 1:
        return None
    if config.get("model_arch") in LAYERED and named[0] in (DFLASH, *ARCHITECTURES):
        return str(config["model_arch"])
    if named[0] != DFLASH:
        return ARCHITECTURES.get(named[0]) if isinstance(named[0], str) else None
    nested = config.get("dflash_config")
    projector = config.get("projector_type")
    if isinstance(nested, Mapping):
        projector = nested.get("projector_type", projector)
    return projector if projector in PROJECTORS else "dflash"


def settings_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those at the top, and over them those inside `dflash_config`."""
    return {**body, **nested_of(body, is_needed=False)}


def nested_of(body: Mapping[str, Any], is_needed: bool = True) -> Mapping[str, Any]:
    """`dflash_config`, where engines look for what they read nowhere else."""
    nested = body.get("dflash_config") or ({} if not is_needed else None)
    if not isinstance(nested, Mapping):
        raise refused("dflash_config is no object", str(nested), "keys and values", REPAIR)
    return nested


def number_of(settings: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A size of the head; IncompatibleError where config.json does not say one."""
    found = settings.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= 1 << 16:
        what = "config.json does not say a size of the head"
        raise refused(what, f"{key}: {found}", f"{least} or more", REPAIR, f"config.json:{key}")
    return found


def taps_of(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The hidden states that the head reads, of the layers that `target_layer_ids` counts."""
    ids = settings.get("target_layer_ids")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        what = "config.json does not say which layers the head reads"
        raise refused(what, f"target_layer_ids: {ids}", "a list of layers", REPAIR)
    return tuple(taps_of_layer_ids(ids))


def reading_of(
    body: Mapping[str, Any], family: str, num_drafted: int, own: Mapping[str, Any]
) -> BlockReading:
    """What config.json says of a block that drafts so many tokens, with these options of its
    correction."""
    settings, config = settings_of(body), derived_config(body, "qwen3")
    return BlockReading(
        config,
        taps_of(settings),
        settings.get("mask_token_id"),
        num_drafted,
        family,
        own,
        is_causal(settings),
        window_of(config, settings),
    )


class BlockReader(Protocol):
    """An engine's reader of a folder."""

    def walked(self, trial: Trial) -> Trial: ...

    def drafted_logits(self, trial: Trial) -> Tensor: ...

    def confidences(self, trial: Trial) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class FlatRules:
    """An engine's reader of folders of one architecture, given a folder, the target's embedding and
    LM head and its number of layers; `keys` is what the copy that it reads says otherwise."""

    architecture: str
    reader: Callable[[Path, Tensor, Tensor, int], BlockReader]
    engine: str = ENGINE
    keys: Mapping[str, Any] = field(default_factory=dict)


def imported(
    published: Published,
    target: Target,
    reading: BlockReading,
    rules: FlatRules,
    notes: tuple[str, ...] = (),
) -> Imported:
    """The drafter of a folder, proved by an engine's rules on a copy in that engine's spelling."""
    drafter = drafter_of(reading, published.tensors, target)
    check_lent(drafter)
    tensors = engine_tensors(published.tensors, reading.family)
    staged = {
        "architectures": [rules.architecture],
        "model_type": "qwen3",
        **causal_key(reading),
        **rules.keys,
    }

    def prove(source: ExportSource) -> None:
        trial = Trial.of(source, reading.num_drafted - 1, without=drafter.options.mask_id)
        with published.staged(tensors, **staged) as folder:
            rows = embedding_of(source), head_of(source)
            theirs = rules.reader(folder, *rows, target.spec.num_layers)
            trial = theirs.walked(trial)
            theirs_NV, sure_N = theirs.drafted_logits(trial), theirs.confidences(trial)
        compare(rules.engine, theirs_NV, drafted_logits(twin(source, drafter), trial))
        if reading.family == "dspark":
            check_confidence(source, sure_N, trial)

    notes = (*notes, *causal_notes(reading, published.config))
    return Imported(drafter, rules.engine, prove, reading.num_drafted, notes)


def check_lent(drafter: InjectedBlocks) -> None:
    """IncompatibleError for an embedding or a vocabulary that is not the target's."""
    if drafter.options.mask_id is None or drafter.vocab is not None:
        found = "an embedding or a vocabulary of its own"
        what = "engines take embedding and LM head of a flat block from the target"
        raise refused(what, found, "the target's", ELSEWHERE)


def engine_tensors(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Under the names that engines read, without copies of what the target has."""
    beside = {n: t for n, t in tensors.items() if n not in (*TABLES, EMBEDDING, HEAD)}
    return {published_name(n, family): t for n, t in own_tensors(beside, family).items()}


def causal_key(reading: BlockReading) -> dict[str, bool]:
    """How SGLang is to read the copy that the proof is of."""
    is_said = reading.is_causal or reading.window is not None
    return {"is_causal": reading.is_causal} if is_said else {}


def causal_notes(reading: BlockReading, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to know of a block where config.json does not say in SGLang's way what slots see."""
    default = reading.window is not None
    if reading.is_causal == config.get("is_causal", default):
        return ()
    word = "causal" if reading.is_causal else "not causal"
    value = str(reading.is_causal).lower()
    return (
        f"the block is {word}, which SGLang reads from is_causal alone: there, set it to {value} "
        "or export the package",
    )
