"""DFlash2 as z-lab's flat checkpoint, which SGLang and vLLM read: DFlash's, with the convolutions
of the layers and the selector. What holds of DFlash's embedding, mask and vocabulary holds here.
"""

from __future__ import annotations

from pathlib import Path

from specctl.drafters.blocks.dflash2 import DFlash2
from specctl.export.formats import ExportSource
from specctl.export.layouts.sglang import blocks
from specctl.export.layouts.sglang.layout import Flat, FlatFolder
from specctl.export.readers.sglang_blocks import ENGINE
from specctl.export.readers.sglang_selector import DFLASH2, SglangSelector
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin


def keys_of(drafter: DFlash2) -> dict[str, int]:
    """The sizes of its parts, by their published names."""
    options = drafter.options
    return {
        "conv_kernel_size": options.conv_taps,
        "conv_group_size": options.conv_group,
        "selector_rank": options.rank,
        "selector_top_k": min(options.candidates, drafter.spec.vocab_size),
    }


def write(source: ExportSource) -> FlatFolder:
    drafter = source.drafter
    assert isinstance(drafter, DFlash2)
    return blocks.folder_of(source, DFLASH2, {"block_size": drafter.num_slots, **keys_of(drafter)})


def check(source: ExportSource, folder: Path) -> None:
    """SGLang chooses among the candidates of each slot as the drafter does."""
    drafter = source.drafter
    assert isinstance(drafter, DFlash2)
    trial = Trial.of(source, int(drafter.options.num_heads) - 1, without=drafter.options.mask_id)
    layers = drafter.spec.num_layers
    reader = SglangSelector(folder, embedding_of(source), head_of(source), layers)
    compare(ENGINE, reader.drafted_logits(trial), drafted_logits(twin(source, drafter), trial))


FLAT = Flat("DFLASH", write, check, blocks.serve_both)
