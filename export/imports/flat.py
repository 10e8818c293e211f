"""What flat folders of blocks share, whatever corrects the block: their sizes, the layers that they
read, and how a block that is causal says so to SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specctl.drafters.dflash import InjectedBlocks
from specctl.export.imports.blocks import EMBEDDING, HEAD, TABLES, BlockReading
from specctl.export.imports.heads import ELSEWHERE, REPAIR, refused
from specctl.export.layouts.engines import taps_of_layer_ids


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


def check_lent(drafter: InjectedBlocks) -> None:
    """IncompatibleError for an embedding or a vocabulary that is not the target's."""
    if drafter.options.mask_id is None or drafter.vocab is not None:
        found = "an embedding or a vocabulary of its own"
        what = "engines take embedding and LM head of a flat block from the target"
        raise refused(what, found, "the target's", ELSEWHERE)


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without copies of what the target has."""
    return {n: t for n, t in tensors.items() if n not in (*TABLES, EMBEDDING, HEAD)}


def causal_key(reading: BlockReading) -> dict[str, bool]:
    """How SGLang is to read the copy that the proof is of."""
    return {"is_causal": True} if reading.is_causal else {}


def causal_notes(reading: BlockReading, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to know of a causal block where config.json does not say so in SGLang's way."""
    if not reading.is_causal or config.get("is_causal"):
        return ()
    return (
        "the block is causal, which SGLang reads from is_causal alone: there, set it to true or "
        "export the package",
    )
