"""DFlash in the speculators format: a qwen3 stack of layers without embedding or LM head, both
shared from the target, but for a mask that is no row of the target's embedding: the folder then
carries that embedding with the mask in a row of its own (see `specctl.export.layouts.blocks`), and
vLLM keeps an embedding that differs from the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.export.formats import ExportSource
from specctl.export.layouts.blocks import (
    block_tensors,
    blocks_of,
    embedding_tensors,
    mask_row,
    refuse_heads,
    window_keys,
)
from specctl.export.layouts.engines import hidden_state_ids
from specctl.export.layouts.speculators.eagle3 import layer_config
from specctl.export.layouts.speculators.layout import SpeculatorsFolder, SpeculatorsLayout
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin
from specctl.export.readers.vllm_blocks import ENGINE, VllmBlocks


def length(source: ExportSource) -> int:
    """Drafted tokens: as many as while training, since the slots of a block see each other."""
    return int(source.drafter.options.num_heads)


def written(
    source: ExportSource, kind: str, architecture: str, own: dict[str, Any]
) -> SpeculatorsFolder:
    """A block drafter of that kind, with the keys that only this kind has."""
    drafter = blocks_of(source)
    refuse_heads(source, "vLLM")
    taps = sorted(hidden_state_ids(drafter.own_taps, drafter.spec.num_layers))
    net = drafter.net
    layer = layer_config(source, net.shape, len(net.layers), qk_norm=True)
    layer |= window_keys(drafter)
    if drafter.is_causal or drafter.window is not None:  # vLLM looks here first
        layer["is_causal"] = drafter.is_causal
    return SpeculatorsFolder(
        kind=kind,
        architecture=architecture,
        length=length(source),
        layer=layer,
        own={
            "block_size": drafter.num_slots,
            "mask_token_id": mask_row(source),
            "aux_hidden_state_layer_ids": taps,
            "sliding_window_non_causal": not drafter.is_causal,
            **own,
        },
        tensors=block_tensors(source) | embedding_tensors(source),
    )


def write(source: ExportSource) -> SpeculatorsFolder:
    return written(source, "dflash", "DFlashDraftModel", {"sample_from_anchor": False})


def read(source: ExportSource, folder: Path) -> VllmBlocks:
    """The folder as vLLM reads it beside this target."""
    return VllmBlocks(folder, embedding_of(source), head_of(source))


def check(source: ExportSource, folder: Path) -> None:
    """vLLM drafts the block that the drafter drafts, behind random features."""
    trial = Trial.of(source, length(source) - 1, without=mask_row(source))
    theirs = read(source, folder).drafted_logits(trial)
    compare(ENGINE, theirs, drafted_logits(twin(source, source.drafter), trial))


LAYOUT = SpeculatorsLayout(write, check, "dflash", length)
