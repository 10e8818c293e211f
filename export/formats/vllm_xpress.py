"""XPress as vLLM's own flat checkpoint (`Qwen3XPressModel`): DFlash's, with the refiner. The format
of speculators has other names for it, which vLLM 0.33 does not read.

vLLM knows no token before the root: its slot reads the root itself. A drafter that was trained with
the token before (`before_root: true`) is written all the same, since nothing else changes; the
check compares what vLLM computes with the drafter that reads the root, and a note says so.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from specctl.drafters.blocks.xpress import XPress
from specctl.export.formats import ExportSource, Format
from specctl.export.layouts.engines import dump_json, refuse_scaled_embedding, vllm_command
from specctl.export.layouts.sglang import blocks
from specctl.export.layouts.sglang.layout import FlatFolder
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.tensors import compare_tensors, refuse_not_finite, write_tensors
from specctl.export.readers.trial import Trial, compare, drafted_logits, embedding_of, head_of, twin
from specctl.export.readers.vllm_xpress import ENGINE, XPRESS, VllmXPress

ROUNDS, POOL = 6, 512  # of the published checkpoints


def drafter_of(source: ExportSource) -> XPress:
    drafter = source.drafter
    assert isinstance(drafter, XPress)
    return drafter


def folder_of(source: ExportSource) -> FlatFolder:
    """config.json and the tensors."""
    drafter = drafter_of(source)
    refuse_scaled_embedding(source, ENGINE)
    flat, options = blocks.folder_of(source, XPRESS, {}, engine=ENGINE), drafter.options
    own = {
        "xpress_rank": options.rank,
        "xpress_mlp_hidden": options.rank * options.mlp_ratio,
        "xpress_block_size": drafter.num_slots,
        "xpress_num_passes": min(ROUNDS, int(options.num_heads)),
        "xpress_topc": min(POOL, drafter.spec.vocab_size),
        "sample_from_anchor": False,
    }
    return FlatFolder({**flat.config, **own}, flat.tensors)


def write(source: ExportSource, folder: Path) -> None:
    written = folder_of(source)
    refuse_not_finite(written.tensors)
    write_tensors(written.tensors, folder / WEIGHTS)
    dump_json(written.config, folder / "config.json")


def at_the_root(drafter: XPress) -> XPress:
    """The drafter whose root's slot reads the root itself."""
    made = copy.copy(drafter)
    made.options = replace(drafter.options, before_root=False)
    return made


def check(source: ExportSource, folder: Path) -> None:
    """vLLM scores the block as the drafter that reads the root does."""
    check_files(folder)
    drafter = drafter_of(source)
    trial = Trial.of(source, int(drafter.options.num_heads) - 1, without=drafter.options.mask_id)
    layers = drafter.spec.num_layers
    reader = VllmXPress(folder, embedding_of(source), head_of(source), layers)
    ours = drafted_logits(twin(source, at_the_root(drafter)), trial)
    compare(ENGINE, reader.drafted_logits(trial), ours)
    compare_tensors(folder_of(source).tensors, load_file(folder / WEIGHTS))


def notes(source: ExportSource) -> tuple[str, ...]:
    found = (
        "vLLM drafts greedily, in rounds over the likeliest tokens of each place; with "
        "xpress_topc: 0 in config.json it scores all tokens",
    )
    if not drafter_of(source).options.before_root:
        return found
    return (
        *found,
        "trained with the token before the root (before_root: true), where vLLM reads the root: "
        "specctl bench --set drafter.options.before_root=false measures what that costs",
    )


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    return (vllm_command("dflash", int(source.drafter.options.num_heads), folder),)


FORMAT = Format(
    name="vllm-xpress",
    summary="XPress as a flat checkpoint under vLLM's own names",
    families=("xpress",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
    layout=folder_of,
)
